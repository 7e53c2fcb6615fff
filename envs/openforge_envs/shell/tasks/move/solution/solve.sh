mv {{file}} {{directory}}/
