//! Plots of a result beside published figures: lines over the numbers of connections, or bars for a single number.

use super::{
    ScenarioResult,
    format::{Figure, Measure, Published},
    table,
};
use crate::{
    plot::{self, Bar, Line},
    report::{Series, Spread},
    topology::Topology,
};

/// Number of colours of lines, apart from the one of the baseline.
const COLOURS: usize = 8;

/// Values of a figure by the number of connections.
type Values = Vec<(usize, Spread)>;

/// A series of the run, or figures of a published system.
struct Curve {
    label: String,
    /// CSS classes.
    class: String,
    /// For each figure of the plot.
    values: Vec<Values>,
}

/// A plot and the explanation of its axes and marks.
pub(super) struct Plot {
    pub(super) svg: String,
    pub(super) explanation: String,
}

/// Plots a group of figures in a topology; `None` without values. Of latencies, P50 and P99 are plotted.
pub(super) fn plot(
    result: &ScenarioResult,
    published: &[&Published],
    (topology, measure): (Topology, Measure),
    y_title: &str,
) -> Option<Plot> {
    let is_plotted = |figure: &&Figure| !figure.metric.contains("p90") && !figure.metric.contains("p99_9");
    let figures: Vec<&Figure> = measure.figures().iter().filter(is_plotted).collect();
    let mut curves = measured(result, topology, &figures);
    if curves.is_empty() {
        return None;
    }
    let others = of_others(result, published, topology, &figures);
    let has_others = !others.is_empty();
    curves.extend(others);
    let (svg, mut explanation) = if result.report.settings.connections.len() == 1 {
        (bars(&curves, &figures), "Black lines: least and greatest value of the rounds.".to_owned())
    } else {
        (lines(&curves, &figures, y_title), "Both axes are logarithmic.".to_owned())
    };
    if has_others {
        explanation.push_str(
            " Hollow marks and pale bars: published, not measured here; the sources have the same numbers below. A level \
             line: number of connections not given.",
        );
    }
    Some(Plot { svg, explanation })
}

/// Returns the series of the run in a topology, then the baseline.
fn measured(result: &ScenarioResult, topology: Topology, figures: &[&Figure]) -> Vec<Curve> {
    let mut all: Vec<Series> = Vec::new();
    for row in result.report.summary.iter().filter(|row| row.series.topology == topology) {
        if !all.contains(&row.series) {
            all.push(row.series);
        }
    }
    let colours = (0..).map(|index| format!("peer{}", index % COLOURS));
    let all = all.into_iter().zip(colours).chain([(Series::BASELINE, "none".to_owned())]);
    let curve = |(series, class): (Series, String)| {
        let rows = || result.report.summary.iter().filter(|row| row.series == series);
        let values = |figure: &&Figure| -> Values {
            let value = |spread: &Spread| spread.divided_by(figure.unit);
            rows().filter_map(|row| Some((row.connections, value(row.metrics.get(figure.metric)?)))).collect()
        };
        let values: Vec<Values> = figures.iter().map(values).collect();
        values.iter().any(|values| !values.is_empty()).then(|| Curve {
            label: series.measured_with(),
            class,
            values,
        })
    };
    all.filter_map(curve).collect()
}

/// Returns the published figures of a topology and of the baseline, with their numbers in the list of sources.
fn of_others(
    result: &ScenarioResult,
    published: &[&Published],
    topology: Topology,
    figures: &[&Figure],
) -> Vec<Curve> {
    let connections = &result.report.settings.connections;
    let mut curves: Vec<Curve> = Vec::new();
    for (index, one) in published.iter().enumerate() {
        if one.topology != topology && one.topology != Topology::Baseline {
            continue;
        }
        let mut values = vec![Values::new(); figures.len()];
        for row in one.rows.iter().filter(|row| table::has_connections_of(result, row)) {
            for (values, figure) in values.iter_mut().zip(figures) {
                let Some(value) = row.metrics.get(figure.metric).map(|value| value / figure.unit) else {
                    continue;
                };
                let spread = Spread { median: value, min: value, max: value };
                let ends = [connections.iter().min(), connections.iter().max()];
                match row.connections {
                    Some(number) => values.push((number, spread)),
                    None => values.extend(ends.into_iter().flatten().map(|number| (*number, spread))),
                }
            }
        }
        if values.iter().any(|values| !values.is_empty()) {
            let class = format!("published{} published", index % COLOURS);
            curves.push(Curve { label: one.label(index), class, values });
        }
    }
    curves
}

/// Plots lines; values up to 0 are left out, because the axes are logarithmic.
fn lines(curves: &[Curve], figures: &[&Figure], y_title: &str) -> String {
    let mut lines = Vec::new();
    for curve in curves {
        for ((figure, style), values) in figures.iter().zip(["", " high", " dots"]).zip(&curve.values) {
            let mut points: Vec<(f64, f64)> = values
                .iter()
                .map(|(connections, spread)| (*connections as f64, spread.median))
                .filter(|(_, value)| *value > 0.0)
                .collect();
            points.sort_by(|(first, _), (second, _)| first.total_cmp(second));
            let label = format!("{} {}", curve.label, short_title(figure));
            if !points.is_empty() {
                lines.push(Line { label, class: format!("{}{style}", curve.class), points });
            }
        }
    }
    plot::lines(&lines, "connections", y_title)
}

/// Plots bars, with a heading for each figure.
fn bars(curves: &[Curve], figures: &[&Figure]) -> String {
    let group = |(index, figure): (usize, &&Figure)| {
        let bar = |curve: &Curve| {
            let (_, spread) = *curve.values.get(index)?.first()?;
            Some(Bar {
                label: curve.label.clone(),
                parts: vec![(spread.median, curve.class.clone())],
                range: (spread.min, spread.max),
            })
        };
        (figure.title.to_owned(), curves.iter().filter_map(bar).collect::<Vec<_>>())
    };
    let groups: Vec<_> = figures.iter().enumerate().map(group).filter(|(_, bars)| !bars.is_empty()).collect();
    plot::bars(&groups, 1)
}

/// Returns the label of a line: the percentile, or the side.
fn short_title(figure: &Figure) -> &'static str {
    match figure.metric {
        metric if metric.contains("p50") => "P50",
        metric if metric.contains("p99") => "P99",
        metric if metric.contains("client") => "client's",
        metric if metric.contains("access_log") => "for the log",
        metric if metric.contains("collectors") => "collectors",
        metric if metric.contains("proxies") => "sidecars",
        _ => "server's",
    }
}
