echo {{word}} > {{file}}
