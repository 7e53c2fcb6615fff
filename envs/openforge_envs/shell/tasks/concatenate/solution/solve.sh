cat {{first}} {{second}} > {{target}}
