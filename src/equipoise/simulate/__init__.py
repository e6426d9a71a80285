"""Replays loads through planners and a cost model: will balancing pay, with how many ranks and slots?"""
