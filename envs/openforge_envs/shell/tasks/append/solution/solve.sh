echo {{word}} >> {{file}}
