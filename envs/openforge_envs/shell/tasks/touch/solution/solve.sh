touch {{file}}
