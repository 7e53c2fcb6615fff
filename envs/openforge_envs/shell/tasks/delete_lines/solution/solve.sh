sed -i '/{{needle}}/d' {{file}}
