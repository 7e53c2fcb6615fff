"""The curves of a run as plotly figures."""

from plotly import graph_objects as go

from openforge.cli.report.story import Story

LAYOUT = {"template": "plotly_white", "height": 320, "margin": {"l": 50, "r": 20, "t": 40, "b": 40}}


def figures(story: Story) -> dict[str, go.Figure]:
    """Title -> figure, for everything there is data for."""
    versions = [step.version for step in story.steps]
    curves: dict[str, dict[str, list[float]]] = {
        "Reward of the trained batch": {"reward": [step.reward for step in story.steps]},
        "Seconds per step": {"learner": [step.step_s for step in story.steps]},
        "Loss tokens": {
            "trained": [step.loss_tokens for step in story.steps],
            "masked": [step.masked_tokens for step in story.steps],
        },
    }
    made = {title: _lines(title, versions, lines) for title, lines in curves.items() if versions}
    if versions:
        made["Lag of trained tokens"] = _lags(story)
        made["Learner"] = _learner(story)
    for metric in story.metric_names():
        points = story.by_version(metric)
        if len(points) > 1:
            title = f"{metric.replace('_', ' ').capitalize()} by weight version"
            made[title] = _lines(title, [point[0] for point in points], {metric: [point[1] for point in points]})
    return made


def _lines(title: str, x: list[int], lines: dict[str, list[float]]) -> go.Figure:
    figure = go.Figure(layout=LAYOUT | {"title": title, "xaxis_title": "weight version"})
    for name, y in lines.items():
        figure.add_scatter(x=x, y=list(y), name=name, mode="lines+markers")
    return figure


def _lags(story: Story) -> go.Figure:
    figure = go.Figure(layout=LAYOUT | {"title": "Lag of trained tokens", "barmode": "stack", "yaxis_title": "tokens"})
    for lag in sorted({lag for step in story.steps for lag in step.lags}):
        figure.add_bar(
            x=[step.version for step in story.steps],
            y=[step.lags.get(lag, 0) for step in story.steps],
            name=f"lag {lag}",
        )
    return figure


def _learner(story: Story) -> go.Figure:
    """Every metric of the learner, one shown at a time: click the legend for others."""
    figure = go.Figure(layout=LAYOUT | {"title": "Learner (click the legend)", "height": 380})
    names = sorted({name for step in story.steps for name in step.metrics})
    for number, name in enumerate(names):
        figure.add_scatter(
            x=[step.version for step in story.steps],
            y=[step.metrics.get(name) for step in story.steps],
            name=name,
            mode="lines+markers",
            visible=True if number == 0 else "legendonly",
        )
    return figure
