echo {{first}} {{second}} > {{file}}
