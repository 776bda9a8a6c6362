"""The parts that the dashboards are made of, on the official grafana-foundation-sdk.

A panel has a title, a description for readers that do not know the product, a unit, and queries as (expression, legend). Nothing turns a
missing series into 0: an unknown value is a gap, or the text `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
#: Sizes of panels in units of Grafana's grid, which is 24 wide.
HALF, QUARTER, HEIGHT, LOW = 12, 6, 8, 4
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are pairs of an expression and a legend. `form` is `lines`, `number` or `table`."""

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    form: str = "lines"
    #: Values from which the colour is orange and red. Without them the colour says nothing.
    bad_from: tuple[float, float] | None = None
    width: int = HALF


@dataclass(frozen=True)
class Row:
    """Panels under a title. A collapsed row is for special cases."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


def lines(title: str, text: str, unit: str, *queries: tuple[str, str]) -> Panel:
    """Values over time."""
    return Panel(title, text, unit, queries)


def number(title: str, text: str, unit: str, query: str, *, bad_from: tuple[float, float] | None = None) -> Panel:
    """The value now."""
    return Panel(title, text, unit, ((query, ""),), form="number", bad_from=bad_from, width=QUARTER)


def ranking(title: str, text: str, unit: str, query: str) -> Panel:
    """Resources by their value now, the greatest first."""
    return Panel(title, text, unit, ((query, ""),), form="table")


def variable(name: str, label: str, query: str, *, multi: bool = False) -> dashboard.QueryVariable:
    """A choice of label values, which `query` (label_values) gives."""
    made = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    return made.multi(True).include_all(True).all_value(".*") if multi else made  # noqa: FBT003 - the SDK takes it so


def board(
    uid: str, title: str, text: str, variables: Iterable[dashboard.QueryVariable], rows: Iterable[Row]
) -> models.Dashboard:
    """A dashboard with a choice of the data source, the variables and the rows. `uid` never changes: links and bookmarks use it."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags(["persist"])
        .timezone("browser")
        .refresh("1m")
        .time("now-6h", "now")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("persist")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["persist"])
            .include_vars(True)  # noqa: FBT003
            .keep_time(True)  # noqa: FBT003
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for one in variables:
        made = made.with_variable(one)
    number_of = 0
    for row in rows:
        head = dashboard.Row(row.title).collapsed(row.collapsed)
        panels = []
        for panel in row.panels:
            number_of += 1
            height = LOW if panel.form == "number" else HEIGHT
            panels.append(_built(panel).id(number_of).span(panel.width).height(height))
        for one in panels if row.collapsed else ():
            head = head.with_panel(one)
        made = made.with_row(head)
        for one in () if row.collapsed else panels:
            made = made.with_panel(one)
    return made.build()


def _built(panel: Panel) -> timeseries.Panel | stat.Panel | table.Panel:
    kinds = {"lines": _lines, "number": _number, "table": _table}
    return kinds[panel.form](panel)


def _query(panel: Panel, at: int) -> prometheus.Dataquery:
    expression, legend = panel.queries[at]
    made = prometheus.Dataquery().expr(expression).ref_id("ABCDEFGH"[at]).legend_format(legend)
    return made.range() if panel.form == "lines" else made.instant()


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .show_legend(True)  # noqa: FBT003
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .calcs([])
    )
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(SOURCE)
        .unit(panel.unit)
        .no_value(UNKNOWN)
        .axis_soft_min(0)
        .fill_opacity(5)
        .span_nulls(False)  # noqa: FBT003 - a gap is a gap
        .legend(legend)
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    for at in range(len(panel.queries)):
        made = made.with_target(_query(panel, at))
    return made


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [models.Threshold(color="text", value=None)]
    if panel.bad_from is not None:
        orange, red = panel.bad_from
        steps = [
            models.Threshold(color="green", value=None),
            models.Threshold(color="orange", value=orange),
            models.Threshold(color="red", value=red),
        ]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _number(panel: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(SOURCE)
        .unit(panel.unit)
        .no_value(UNKNOWN)
        .thresholds(_thresholds(panel))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))  # noqa: FBT003
        .with_target(_query(panel, 0))
    )


def _table(panel: Panel) -> table.Panel:
    hidden = dict.fromkeys(("Time", "instance", "pod", "job", "endpoint", "service", "container", "__name__"), True)
    tidy = models.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
    return (
        table.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(SOURCE)
        .unit(panel.unit)
        .no_value(UNKNOWN)
        .show_header(True)  # noqa: FBT003 - an option must be set, or Grafana gets null for all of them
        .with_target(_query(panel, 0).format(PromQueryFormat.TABLE))
        .transformations([tidy])
    )
