grep -w {{needle}} {{source}} > {{target}}
