//! The history of a scenario: a trend of each figure over its results, and a table of all medians.

use std::fmt::Write as _;

use super::{StoredResult, short};
use crate::{
    html,
    plot::{self, Line, LinePoint, LineTitles, escape},
    scenario::{
        ScenarioResult,
        figures::{self, FigureHistory, Plot, STYLES},
        format::Figure,
        page,
        study::AnyResult,
    },
};

/// Maximum number of results of which the history has values.
const MAX_COLUMNS: usize = 8;
/// Characters of a date in the labels of a trend: month and day.
const MONTH_AND_DAY: std::ops::Range<usize> = 5..10;

/// Returns the history, or the condition for one.
pub(super) fn section(results: &[StoredResult], number: &mut usize) -> String {
    let heading = page::subheading("Trend");
    if results.len() < 2 {
        return format!(
            "{heading}<p>There is one result. A trend needs a second one: run the scenario again, with another commit, and write \
             the site again.</p>"
        );
    }
    let shown = &results[results.len().saturating_sub(MAX_COLUMNS)..];
    let values: Vec<Vec<FigureHistory>> = shown.iter().map(StoredResult::history).collect();
    format!("{heading}{}{}", trends(shown, &values, number), table(shown, &values))
}

/// Returns the trends of the figures of the newest result, for each topology or section.
fn trends(results: &[StoredResult], values: &[Vec<FigureHistory>], number: &mut usize) -> String {
    let Some(newest) = values.last() else { return String::new() };
    let label = |stored: &StoredResult| {
        let facts = stored.facts();
        let date = html::date(facts.started);
        format!("{} {}", short(facts.commit), date.get(MONTH_AND_DAY).unwrap_or(&date))
    };
    let labels: Vec<String> = results.iter().map(label).collect();
    let mut machines: Vec<&str> = results.iter().map(|stored| stored.facts().machine.cpu.as_str()).collect();
    machines.dedup();
    let mut made = "Medians on an axis with zero, from the oldest result to the newest; below the axis are commit, month and day. \
                    Vertical lines: least and greatest value of the rounds."
        .to_owned();
    if machines.len() > 1 {
        made.push_str(" The results are of different processors, so a step may be one of the machine.");
    }
    let mut text = String::new();
    let mut sections: Vec<&str> = newest.iter().map(|value| value.section.as_str()).collect();
    sections.dedup();
    for section in sections {
        let of_section: Vec<&FigureHistory> =
            newest.iter().filter(|value| value.section == section && value.is_drawn).collect();
        let mut drawn: Vec<&Figure> = Vec::new();
        let mut series: Vec<(&str, &str)> = Vec::new();
        for value in &of_section {
            if !drawn.iter().any(|figure| figure.metric == value.figure.metric) {
                drawn.push(value.figure);
            }
            if !series.iter().any(|(name, _)| *name == value.series) {
                series.push((&value.series, &value.colour));
            }
        }
        let parts = parts(&series);
        for (index, lines) in parts.iter().enumerate() {
            let panels = drawn.iter().map(|figure| trend(figure, (section, lines), values, &labels));
            let entries = lines.iter().map(|(name, class)| (format!("line {class}"), (*name).to_owned()));
            let plot = Plot {
                panels: panels.filter(|panel| !panel.is_empty()).collect(),
                legend: plot::legend(&entries.collect::<Vec<_>>()),
                explanation: String::new(),
            };
            if !plot.panels.is_empty() {
                let title = format!("Trend: {section}{}", page::part(index, parts.len()));
                text.push_str(&page::figure_of(&title, &plot, &made, number));
            }
        }
    }
    text
}

/// Returns the names and CSS classes of the lines of each plot: the colour of the peer, and a style for each further line
/// of it. A plot has no two lines that look the same.
fn parts<'a>(series: &[(&'a str, &str)]) -> Vec<Vec<(&'a str, String)>> {
    let mut parts: Vec<Vec<(&str, String)>> = Vec::new();
    for (index, (name, colour)) in series.iter().enumerate() {
        let earlier = series[..index].iter().filter(|(_, other)| other == colour).count();
        let part = earlier / STYLES.len();
        if part == parts.len() {
            parts.push(Vec::new());
        }
        if let Some(lines) = parts.get_mut(part) {
            lines.push((name, format!("{colour}{}", STYLES[earlier % STYLES.len()])));
        }
    }
    parts
}

/// Returns the trend of a figure: a line for each series.
fn trend(
    figure: &Figure,
    (section, series): (&str, &[(&str, String)]),
    values: &[Vec<FigureHistory>],
    labels: &[String],
) -> String {
    let line = |(name, class): &(&str, String)| {
        let point = |(index, values): (usize, &Vec<FigureHistory>)| {
            let is_same = |value: &&FigureHistory| {
                value.section == section && value.series == *name && value.figure.metric == figure.metric
            };
            let spread = values.iter().find(is_same)?.spread;
            Some(LinePoint { x: index as f64, y: spread.median, range: Some((spread.min, spread.max)) })
        };
        Line {
            label: (*name).to_owned(),
            class: class.clone(),
            points: values.iter().enumerate().filter_map(point).collect(),
        }
    };
    let lines: Vec<Line<LinePoint>> =
        series.iter().map(line).filter(|line| !line.points.is_empty()).collect();
    let titles = LineTitles {
        plot: figures::measured(figure),
        x: "commit and date of the result",
        y: figures::unit(figure),
    };
    plot::trend(&lines, labels, titles)
}

/// Returns the table of the history: a row for each figure of the newest result, a column for each result.
fn table(results: &[StoredResult], values: &[Vec<FigureHistory>]) -> String {
    let cpu = results.last().map(|stored| stored.facts().machine.cpu.as_str()).unwrap_or_default();
    let mut text = "<p>Medians, from the oldest result to the newest. change: the newest median over the one before it with the \
                    same processor. bench diff tests whether a difference is chance.</p>\
                    <div class=\"wide\"><table><tr><th>series</th><th>figure</th><th>change</th>"
        .to_owned();
    // Writing to a String cannot fail.
    for stored in results {
        let facts = stored.facts();
        let _ = write!(
            text,
            "<th>{}<br>{}</th>",
            escape(&html::date(facts.started)),
            escape(&short(facts.commit))
        );
    }
    text.push_str("</tr>");
    for row in values.last().into_iter().flatten() {
        let of = |values: &Vec<FigureHistory>| {
            let mut same = values.iter().filter(|value| {
                value.section == row.section
                    && value.series == row.series
                    && value.figure.metric == row.figure.metric
            });
            same.next().map(|value| value.spread.median)
        };
        let medians: Vec<Option<f64>> = values.iter().map(of).collect();
        let earlier = results.iter().zip(&medians).rev().skip(1);
        let before =
            earlier.filter(|(stored, _)| stored.facts().machine.cpu == cpu).find_map(|(_, median)| *median);
        let change = before.filter(|before| *before > 0.0).map(|before| row.spread.median / before);
        let cells = medians.iter().map(|median| {
            median.map_or_else(
                || "<td>-</td>".to_owned(),
                |median| format!("<td>{median:.*}</td>", row.figure.digits),
            )
        });
        let _ = write!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{}</td>{}</tr>",
            escape(&format!("{}, {}", row.section, row.series)),
            escape(row.figure.title),
            change.map_or_else(|| "-".to_owned(), |change| format!("× {change:.2}")),
            cells.collect::<String>()
        );
    }
    text.push_str("</table></div>");
    text
}

impl StoredResult {
    fn history(&self) -> Vec<FigureHistory> {
        match &self.result {
            AnyResult::Traffic(result) => of_traffic(result),
            AnyResult::Generation(result) => result.history(),
            AnyResult::Mesh(result) => result.history(),
            AnyResult::Command(result) => result.history(),
            AnyResult::Networks(result) => result.history(),
            AnyResult::Airline(result) => result.history(),
        }
    }
}

/// Returns the figures of a result of traffic. The trend has those of the most connections.
fn of_traffic(result: &ScenarioResult) -> Vec<FigureHistory> {
    let most = result.report.settings.connections.iter().max();
    let rows = result.report.summary.iter().flat_map(|row| {
        result.scenario.figures().filter_map(move |figure| {
            Some(FigureHistory {
                section: row.series.topology.name().to_owned(),
                series: format!("{}, {} connections", row.series.measured_with(), row.connections),
                colour: figures::colour(row.series.peer),
                figure,
                spread: row.metrics.get(figure.metric)?.divided_by(figure.unit),
                is_drawn: Some(&row.connections) == most,
            })
        })
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_has_no_two_lines_that_look_the_same() {
        let names: Vec<String> = (0..10).map(|number| format!("case-{number}")).collect();
        let mut series: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "peer0")).collect();
        series.insert(0, ("none", "none"));
        let parts = parts(&series);
        assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [5, 4, 2], "{parts:?}");
        for lines in &parts {
            let mut classes: Vec<&str> = lines.iter().map(|(_, class)| class.as_str()).collect();
            classes.sort_unstable();
            classes.dedup();
            assert_eq!(classes.len(), lines.len(), "{lines:?}");
        }
    }
}
