sort {{source}} > {{target}}
