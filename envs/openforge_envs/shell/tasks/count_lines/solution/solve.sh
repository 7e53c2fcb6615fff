wc -l < {{source}} > {{target}}
