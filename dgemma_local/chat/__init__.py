"""A conversation and what can be done with it, without a terminal and without a model.

conversation   the frozen state; functions from one state to the next
commands       a line to a command, what may follow it, and which lines belong together
document       a conversation as the text of its file, checked when it is read
store          the folder of those files: written whole or not at all
export         a conversation as Markdown, JSON or HTML
"""
