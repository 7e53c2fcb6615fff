sed -i 's/^{{wrong}} /echo /' {{file}}
