mv *.{{extension}} {{directory}}/
