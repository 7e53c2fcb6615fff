sed -i 's/{{old}}/{{new}}/g' {{file}}
