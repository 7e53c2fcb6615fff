tac {{source}} > {{target}}
