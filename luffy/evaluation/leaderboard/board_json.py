"""The leaderboard as data, for programs: what `leaderboard.json` holds."""

import json

from luffy.evaluation.leaderboard.board import Board, BoardTable, Lead, Reference
from luffy.evaluation.leaderboard.entries import Column, Entry

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def board_json(board: Board) -> str:
    """All tables with every number unrounded, accuracies in [0, 1]."""
    content: Json = {
        "tables": [_table(table) for table in board.tables],
        "left_out": [{"directory": str(item.directory), "reason": item.reason} for item in board.left_out],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _table(table: BoardTable) -> Json:
    return {
        "protocol": dict(table.protocol.settings),
        "decoding": table.protocol.decoding,
        "confidence": table.confidence,
        "columns": [_column(column) for column in table.columns],
        "rows": [_row(table, entry) for entry in table.rows],
        "published": [_reference(table, reference) for reference in table.references],
    }


def _column(column: Column) -> Json:
    return {
        "suite": column.suite,
        "num_problems": column.num_problems,
        "num_samples": column.num_samples,
        "problems": column.problems,
    }


def _row(table: BoardTable, entry: Entry) -> Json:
    mean = table.mean(entry)
    return {
        "experiment": entry.name.experiment,
        "method": entry.name.method,
        "checkpoint": entry.name.checkpoint,
        "variant": entry.name.variant,
        "model": entry.model,
        "runs": list(entry.runs),
        "mean": None if mean is None else {"accuracy": mean.value, "interval": list(mean.interval)},
        "cells": [_cell(table, entry, column) for column in table.columns],
    }


def _cell(table: BoardTable, entry: Entry, column: Column) -> Json:
    """A cell in the order of the columns; null where the model was not evaluated."""
    cell, lead = entry.cells.get(column), table.leads.get(column)
    if cell is None:
        return None
    return {
        "accuracy": cell.row.accuracy,
        "interval": list(cell.row.interval),
        "method": cell.row.method,
        "evaluation": cell.evaluation,
        "lead": _lead(lead) if lead is not None and lead.best is entry else None,
    }


def _lead(lead: Lead) -> Json:
    difference = lead.comparison.paired
    return {
        "over": lead.next.name.text,
        "difference": difference.difference.value,
        "interval": list(difference.difference.interval),
        "wins": difference.wins,
        "ties": difference.ties,
        "losses": difference.losses,
        "p": difference.p_value,
        "adjusted_p": lead.comparison.adjusted_p,
        "is_clear": lead.is_clear,
    }


def _reference(table: BoardTable, reference: Reference) -> Json:
    return {
        "name": reference.row.name,
        "title": reference.table.title,
        "source": reference.table.source,
        "model": reference.table.model,
        "protocol": reference.table.protocol,
        "accuracies": [reference.accuracies.get(column) for column in table.columns],
    }
