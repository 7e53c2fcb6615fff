mv {{old}} {{new}}
