wc -w < {{source}} > {{target}}
