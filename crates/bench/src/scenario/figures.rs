//! Plots of a result beside published figures: lines over the numbers of connections, or bars for a single number. Each
//! figure has a plot of its own.

mod summary;
mod terms;
mod units;

use super::{
    ScenarioResult,
    format::{Figure, Measure, Published},
    table,
};
use crate::{
    peers::Peer,
    plot::{self, Bar, BarAxis, Line, LinePoint, LineTitles},
    report::{Series, Spread},
    topology::Topology,
};

pub(super) use self::{
    summary::{FigureHistory, MainFigure},
    terms::{Term, of_cases, of_traffic},
    units::{are_percentiles, measured, title, unit, with_unit},
};

/// Number of colours of published systems.
const COLOURS: usize = 8;
/// Styles of the lines of one colour, of a peer. A plot has no more lines of a colour than these.
pub(super) const STYLES: [&str; 4] = ["", " high", " dots", " dashes"];
/// Explanation of the ranges in bars and in lines, for captions.
pub(super) const RANGE_OF_BARS: &str =
    "Black lines: least and greatest value of the rounds; the number beside is the median.";
const RANGE_OF_LINES: &str = "Vertical lines: least and greatest value of the rounds; marks of one number of connections are moved apart.";
const AXES_OF_LINES: &str =
    "Both axes are logarithmic; an axis that begins at 0 or below is linear, because it has such values.";
/// Explanation of published values in bars, for captions.
pub(super) const PUBLISHED_BARS: &str = "Pale bars with hollow marks: published, not measured here, and of another size than \
                                         the measured ones, which their names give if it is known; the sources have the same \
                                         numbers below. An arrow: the value is beyond the axis.";

/// Values of a figure by the number of connections.
type Values = Vec<(usize, Spread)>;

/// A series of the run, or figures of a published system.
struct Curve {
    label: String,
    /// CSS classes: the colour, and the style of a line.
    colour: String,
    style: &'static str,
    /// Peer of a series of the run.
    peer: Option<&'static str>,
    /// Number of the plot that has the curve; `None` for all plots.
    plot: Option<usize>,
    /// For each figure of the group.
    values: Vec<Values>,
}

/// Plots of a group of figures, their legend, and the explanation of their axes and marks.
pub(super) struct Plot {
    /// A plot for each figure.
    pub(super) panels: Vec<String>,
    pub(super) legend: String,
    pub(super) explanation: String,
}

/// Returns the CSS class of a peer, which has the same colour in all plots of all pages. `None`: without a proxy.
pub(super) fn colour(peer: Option<Peer>) -> String {
    let of = |peer: Peer| {
        let index = Peer::ALL.iter().position(|other| *other == peer).unwrap_or(Peer::ALL.len());
        format!("peer{index}")
    };
    peer.map_or_else(|| "none".to_owned(), of)
}

/// Returns the CSS classes of a published system, by its number in the list of sources from zero on.
pub(super) fn published_colour(index: usize) -> String {
    format!("published{} published", index % COLOURS)
}

/// Plots a group of figures in a topology. There are several plots if a peer has more lines than styles, and none without
/// values. Each has the baseline and the published figures.
pub(super) fn plots(
    result: &ScenarioResult,
    published: &[&Published],
    (topology, measure): (Topology, Measure),
) -> Vec<Plot> {
    let figures: Vec<&Figure> = measure.figures().iter().collect();
    let mut curves = measured_curves(result, topology, &figures);
    if curves.is_empty() {
        return Vec::new();
    }
    let others = of_others(result, published, topology, &figures);
    let has_others = !others.is_empty();
    curves.extend(others);
    // Bars have labels.
    let has_bars = result.report.settings.connections.len() == 1;
    let last = curves.iter().filter_map(|curve| curve.plot).max().filter(|_| !has_bars).unwrap_or_default();
    let of_plot = |number: usize| {
        let shown = curves.iter().filter(|curve| has_bars || curve.plot.is_none_or(|plot| plot == number));
        of_curves(&shown.collect::<Vec<_>>(), &figures, (has_bars, has_others))
    };
    (0..=last).map(of_plot).collect()
}

/// Plots figures, with bars or with lines, and with published ones or without.
fn of_curves(curves: &[&Curve], figures: &[&Figure], (has_bars, has_others): (bool, bool)) -> Plot {
    let of_figure = |(index, figure): (usize, &&Figure)| {
        if has_bars { bars(curves, index, figure) } else { lines(curves, index, figure) }
    };
    let panels = figures.iter().enumerate().map(of_figure).filter(|panel| !panel.is_empty()).collect();
    let explanation = match (has_bars, has_others) {
        (true, false) => RANGE_OF_BARS.to_owned(),
        (true, true) => format!("{RANGE_OF_BARS} {PUBLISHED_BARS}"),
        (false, false) => format!("{RANGE_OF_LINES} {AXES_OF_LINES}"),
        (false, true) => format!(
            "{RANGE_OF_LINES} {AXES_OF_LINES} Hollow marks: published, not measured here; the sources have the \
             same numbers below. A level line: number of connections not given."
        ),
    };
    // Bars have labels, so their legend has the colours of peers alone.
    let entry = |curve: &&Curve| match curve.peer {
        Some(peer) if has_bars => (curve.colour.clone(), peer.to_owned()),
        None if has_bars => (curve.colour.clone(), curve.label.clone()),
        _ => (format!("line {}{}", curve.colour, curve.style), curve.label.clone()),
    };
    let entries: Vec<(String, String)> = curves.iter().map(entry).collect();
    Plot { panels, legend: plot::legend(&entries), explanation }
}

/// Returns the series of the run in a topology, then the baseline.
fn measured_curves(result: &ScenarioResult, topology: Topology, figures: &[&Figure]) -> Vec<Curve> {
    let mut all: Vec<Series> = Vec::new();
    for row in result.report.summary.iter().filter(|row| row.series.topology == topology) {
        if !all.contains(&row.series) {
            all.push(row.series);
        }
    }
    let place = |index: usize| {
        let earlier = all[..index].iter().filter(|series| series.peer == all[index].peer).count();
        (STYLES[earlier % STYLES.len()], Some(earlier / STYLES.len()))
    };
    let places: Vec<(&str, Option<usize>)> = (0..all.len()).map(place).collect();
    let all = all.into_iter().zip(places).chain([(Series::BASELINE, ("", None))]);
    let curve = |(series, (style, plot)): (Series, (&'static str, Option<usize>))| {
        let rows = || result.report.summary.iter().filter(|row| row.series == series);
        let values = |figure: &&Figure| -> Values {
            let value = |spread: &Spread| spread.divided_by(figure.unit);
            rows().filter_map(|row| Some((row.connections, value(row.metrics.get(figure.metric)?)))).collect()
        };
        let values: Vec<Values> = figures.iter().map(values).collect();
        values.iter().any(|values| !values.is_empty()).then(|| Curve {
            label: series.measured_with(),
            colour: colour(series.peer),
            style,
            peer: Some(series.peer.map_or("no sidecar", Peer::name)),
            plot,
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
            let (label, colour) = (one.label(index), published_colour(index));
            curves.push(Curve { label, colour, style: "", peer: None, plot: None, values });
        }
    }
    curves
}

/// Plots the lines of a figure.
fn lines(curves: &[&Curve], index: usize, figure: &Figure) -> String {
    let line = |curve: &&Curve| {
        let point = |(connections, spread): &(usize, Spread)| LinePoint {
            x: *connections as f64,
            y: spread.median,
            range: curve.peer.map(|_| (spread.min, spread.max)),
        };
        let mut points: Vec<LinePoint> = curve.values.get(index)?.iter().map(point).collect();
        points.sort_by(|first, second| first.x.total_cmp(&second.x));
        let class = format!("{}{}", curve.colour, curve.style);
        (!points.is_empty()).then(|| Line { label: curve.label.clone(), class, points })
    };
    let lines: Vec<Line<LinePoint>> = curves.iter().filter_map(line).collect();
    plot::line_panel(
        &lines,
        LineTitles { plot: measured(figure), x: "connections of the client", y: unit(figure) },
    )
}

/// Plots the bars of a figure.
fn bars(curves: &[&Curve], index: usize, figure: &Figure) -> String {
    let bar = |curve: &&Curve| {
        let (_, spread) = *curve.values.get(index)?.first()?;
        Some(Bar {
            label: curve.label.clone(),
            parts: vec![(spread.median, curve.colour.clone())],
            range: (spread.min, spread.max),
        })
    };
    let group = (String::new(), curves.iter().filter_map(bar).collect());
    plot::bars(
        &[group],
        BarAxis { plot: measured(figure).to_owned(), title: title(figure), digits: figure.digits },
    )
}
