sort -u {{source}} > {{target}}
