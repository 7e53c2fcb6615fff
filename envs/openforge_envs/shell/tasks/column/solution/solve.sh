cut -d , -f 2 {{source}} > {{target}}
