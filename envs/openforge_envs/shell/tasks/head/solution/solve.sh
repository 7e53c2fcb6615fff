head -n {{count}} {{source}} > {{target}}
