echo word > answer.txt
