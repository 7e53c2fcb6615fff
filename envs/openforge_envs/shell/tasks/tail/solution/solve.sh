tail -n {{count}} {{source}} > {{target}}
