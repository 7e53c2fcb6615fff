chmod +x {{file}}
