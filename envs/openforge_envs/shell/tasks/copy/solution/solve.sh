cp {{source}} {{target}}
