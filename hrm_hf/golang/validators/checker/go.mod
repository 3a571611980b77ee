module checker

go 1.19
