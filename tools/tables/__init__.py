"""Prints and draws the tables of `state_machine`: as Markdown, as a Mermaid diagram, as the picture of the usual path."""
