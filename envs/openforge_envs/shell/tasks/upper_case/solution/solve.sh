tr a-z A-Z < {{source}} > {{target}}
