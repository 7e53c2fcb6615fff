rm {{file}}
