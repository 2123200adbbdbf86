//! The table of edges as lines of text that fit a terminal. Pure: from edges and a size to lines.
//!
//! On a narrow terminal, the middle of long names is removed, down to [`SHORT_NAME`]. Then the least important columns
//! are removed, and then more of the names. On a low one, the unhealthy edges come first, then the busiest, and the
//! last line counts the others. There is no scrolling, because the table is redrawn every second.

use std::fmt::Write as _;

use skysail_core::logging::printable;
use unicode_width::UnicodeWidthChar as _;

use crate::traffic::Edge;

/// Minimum success of a healthy edge, in percent.
pub(crate) const HEALTHY_PERCENT: f64 = 99.0;
/// Width to which names are cut before a column is removed.
const SHORT_NAME: usize = 10;
/// Spaces between two columns.
const GAP: usize = 2;

/// Size of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) columns: usize,
    pub(crate) rows: usize,
}

impl Size {
    /// Size of a file, without limits.
    pub(crate) const UNBOUNDED: Self = Self { columns: usize::MAX, rows: usize::MAX };
}

/// Column of values.
struct Column {
    header: &'static str,
    /// Rank: the column with the highest one is removed first.
    rank: u8,
    value: fn(&Edge) -> String,
}

const COLUMNS: [Column; 6] = [
    Column { header: "REQ/S", rank: 0, value: |edge| format!("{:.1}", edge.requests_per_second) },
    Column { header: "SUCCESS", rank: 1, value: success },
    Column { header: "DENIED", rank: 3, value: |edge| edge.denied.to_string() },
    Column { header: "P50", rank: 5, value: |edge| milliseconds(edge.p50_ms) },
    Column { header: "P99", rank: 2, value: |edge| milliseconds(edge.p99_ms) },
    Column { header: "MTLS", rank: 4, value: mtls },
];

/// Returns the table's lines: none wider than the size's columns, and not more than its rows.
pub(crate) fn lines(edges: &[Edge], size: Size) -> Vec<String> {
    let mut shown: Vec<&Edge> = edges.iter().collect();
    let mut left_out = 0;
    if edges.len() >= size.rows {
        let healthy = |edge: &Edge| edge.requests == 0 || edge.success_percent >= HEALTHY_PERCENT;
        shown.sort_by(|a, b| {
            let busier = b.requests_per_second.total_cmp(&a.requests_per_second);
            healthy(a).cmp(&healthy(b)).then(busier)
        });
        // The header and the last line take one row each.
        shown.truncate(size.rows.saturating_sub(2));
        left_out = edges.len() - shown.len();
    }
    let mut lines = if shown.is_empty() { Vec::new() } else { layout(&shown, size.columns) };
    if left_out > 0 {
        lines.push(rest(left_out, shown.is_empty(), size.columns));
    }
    lines.truncate(size.rows);
    lines
}

/// Returns the line with the number of omitted edges, shortened to the width.
fn rest(count: usize, all: bool, columns: usize) -> String {
    let more = if all { "" } else { " more" };
    let edges = if count == 1 { "edge" } else { "edges" };
    let short = format!("… {count}{more} {edges}");
    let remedies = [": enlarge the terminal, or see all of them at the end", ": enlarge the terminal", ""];
    let variants = remedies.into_iter().map(|remedy| format!("{short}{remedy}"));
    let fits = variants.into_iter().find(|line| width(line) <= columns);
    fits.unwrap_or_else(|| clip(&short, columns))
}

/// Returns the header and a line for each edge.
fn layout(edges: &[&Edge], columns: usize) -> Vec<String> {
    let mut names = [vec!["FROM".to_owned()], vec!["TO".to_owned()]];
    for edge in edges {
        names[0].push(name(&edge.source));
        names[1].push(name(&edge.destination));
    }
    let mut values: Vec<(u8, Vec<String>)> = COLUMNS
        .iter()
        .map(|column| {
            let header = std::iter::once(column.header.to_owned());
            (column.rank, header.chain(edges.iter().map(|edge| (column.value)(edge))).collect())
        })
        .collect();
    let wanted = names.each_ref().map(|cells| widest(cells));
    let short = wanted.iter().map(|width| (*width).min(SHORT_NAME)).sum::<usize>() + GAP;
    let taken =
        |values: &[(u8, Vec<String>)]| -> usize { values.iter().map(|(_, cells)| widest(cells) + GAP).sum() };
    while short + taken(&values) > columns
        && let Some(rank) = values.iter().map(|(rank, _)| *rank).max()
    {
        values.retain(|(other, _)| *other != rank);
    }
    let [from, to] = share(wanted, columns.saturating_sub(taken(&values) + GAP));
    let widths: Vec<usize> = values.iter().map(|(_, cells)| widest(cells)).collect();
    let line = |row: usize| {
        let mut line = pad(&clip(&names[0][row], from), from);
        let _ = write!(line, "{:GAP$}{}", "", pad(&clip(&names[1][row], to), to));
        for ((_, cells), width) in values.iter().zip(&widths) {
            let _ = write!(line, "{:GAP$}{:>width$}", "", cells[row]);
        }
        // On a terminal of a few columns, the gap and the shortest names are still too wide.
        clip(line.trim_end(), columns)
    };
    (0..=edges.len()).map(line).collect()
}

/// Divides a width between two columns of these wanted widths.
fn share(wanted: [usize; 2], room: usize) -> [usize; 2] {
    let [one, other] = wanted;
    if one.saturating_add(other) <= room {
        return wanted;
    }
    let half = room / 2;
    match (one <= half, other <= half) {
        (true, _) => [one, room - one],
        (_, true) => [room - other, other],
        _ => [half, room - half],
    }
}

/// Returns a name for the table. Characters without a width are removed, because terminals differ in showing them.
fn name(name: &str) -> String {
    printable(name).chars().filter(|c| c.width().unwrap_or(0) > 0).collect()
}

/// Cuts a text to a display width and replaces its middle by `…`.
pub(crate) fn clip(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let Some(kept) = columns.checked_sub(1) else { return String::new() };
    let head: String = within(text.chars(), kept.div_ceil(2)).collect();
    let tail: Vec<char> = within(text.chars().rev(), kept / 2).collect();
    head + "…" + &tail.into_iter().rev().collect::<String>()
}

/// Returns the first characters that fit into a width.
fn within(text: impl Iterator<Item = char>, columns: usize) -> impl Iterator<Item = char> {
    text.scan(columns, |room, c| {
        *room = room.checked_sub(c.width().unwrap_or(0))?;
        Some(c)
    })
}

fn pad(text: &str, columns: usize) -> String {
    format!("{text}{:1$}", "", columns.saturating_sub(width(text)))
}

fn widest(cells: &[String]) -> usize {
    cells.iter().map(|cell| width(cell)).max().unwrap_or(0)
}

/// Returns the maximum display width of a text. Characters count one by one, because terminals differ in joining them.
pub(crate) fn width(text: &str) -> usize {
    text.chars().filter_map(|c| c.width()).sum()
}

fn success(edge: &Edge) -> String {
    if edge.requests == 0 { "-".to_owned() } else { format!("{:.1} %", edge.success_percent) }
}

fn milliseconds(time: Option<f64>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| format!("{time:.1} ms"))
}

fn mtls(edge: &Edge) -> String {
    let text = match edge.mtls {
        Some(true) => "yes",
        Some(false) => "no",
        None => "-",
    };
    // Words are aligned to the left.
    format!("{text:<4}")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn edge(source: &str, destination: &str, rate: f64, success_percent: f64) -> Edge {
        Edge {
            source: source.to_owned(),
            destination: destination.to_owned(),
            requests: 100,
            requests_per_second: rate,
            success_percent,
            failed: 0,
            denied: 3,
            p50_ms: Some(0.4),
            p99_ms: Some(19.8),
            mtls: Some(true),
        }
    }

    fn size(columns: usize, rows: usize) -> Size {
        Size { columns, rows }
    }

    #[test]
    fn an_unbounded_table_shows_everything() {
        let edges = [edge("shop/web", "shop/stock", 12.0, 100.0), edge("a/b", "c/d", 1.5, 98.25)];
        let expected = "\
FROM      TO          REQ/S  SUCCESS  DENIED     P50      P99  MTLS
shop/web  shop/stock   12.0  100.0 %       3  0.4 ms  19.8 ms  yes
a/b       c/d           1.5   98.2 %       3  0.4 ms  19.8 ms  yes";
        assert_eq!(lines(&edges, Size::UNBOUNDED).join("\n"), expected);
        assert_eq!(lines(&[], size(80, 24)), [""; 0]);
    }

    #[test]
    fn a_narrow_terminal_removes_columns_and_then_the_middle_of_names() {
        let edges = [edge("recommendations/recommendation-v1", "shop/stock", 12.0, 100.0)];
        let line = |columns: usize| lines(&edges, size(columns, 24)).remove(1);
        let expected = [
            "recommendations/recommendation-v1  shop/stock   12.0  100.0 %       3  0.4 ms  19.8 ms  yes",
            "recommenda…ndation-v1  shop/stock   12.0  100.0 %       3  0.4 ms  19.8 ms  yes",
            "recomme…tion-v1  shop/stock   12.0  100.0 %       3  19.8 ms",
            "recomm…on-v1  shop/stock   12.0  100.0 %",
            "recomm…on-v1  shop/stock",
        ];
        assert_eq!([100, 80, 60, 40, 24].map(line), expected);
    }

    #[test]
    fn every_line_fits_every_terminal() {
        let names = [
            "a/b",
            "namespace/很长的名字很长的名字很长的名字",
            "e\u{301}/👩\u{200d}👩\u{fe0f}",
            "\u{1b}[31m/\n",
            &"x".repeat(500),
        ];
        let pairs = names.iter().flat_map(|from| names.iter().map(move |to| (*from, *to)));
        let edges: Vec<Edge> = pairs.map(|(from, to)| edge(from, to, 123_456.7, 12.3)).collect();
        for columns in 0..130 {
            for rows in 0..30 {
                let lines = lines(&edges, size(columns, rows));
                assert!(lines.len() <= rows, "{columns}x{rows}: {lines:#?}");
                assert!(rows < 3 || lines.len() == rows.min(edges.len() + 1), "{columns}x{rows}: {lines:#?}");
                for line in lines {
                    assert!(width(&line) <= columns, "{columns}x{rows}: {line}");
                    assert!(!line.contains(char::is_control), "{line:?}");
                }
            }
        }
    }

    #[test]
    fn a_low_terminal_shows_unhealthy_edges_and_then_the_busiest() {
        let mut edges: Vec<Edge> =
            (0..20).map(|n| edge("a/b", &format!("to/{n}"), f64::from(n), 100.0)).collect();
        edges[4].success_percent = 98.9;
        let shown = |rows: usize| -> Vec<String> {
            let lines = lines(&edges, size(80, rows));
            let rows = lines.iter().skip(1).map(|line| line.split_whitespace().nth(1).unwrap_or_default());
            rows.map(str::to_owned).chain(lines.last().cloned()).collect()
        };
        assert_eq!(shown(5)[..3], ["to/4", "to/19", "to/18"],);
        assert_eq!(
            shown(5).last().unwrap(),
            "… 17 more edges: enlarge the terminal, or see all of them at the end"
        );
        assert_eq!(shown(21)[..2], ["to/0", "to/1"], "all fit, in their order");
        assert_eq!(lines(&edges, size(30, 5)).last().unwrap(), "… 17 more edges");
        assert_eq!(lines(&edges, size(40, 1)), ["… 20 edges: enlarge the terminal"]);
        assert_eq!(lines(&edges, size(40, 2)), ["… 20 edges: enlarge the terminal"]);
    }

    #[test]
    fn the_middle_of_a_text_is_cut() {
        for (text, columns, clipped) in [
            ("namespace/workload", 18, "namespace/workload"),
            ("namespace/workload", 17, "namespac…workload"),
            ("namespace/workload", 2, "n…"),
            ("namespace/workload", 1, "…"),
            ("namespace/workload", 0, ""),
            ("很长的名字", 6, "很…字"),
        ] {
            assert_eq!(clip(text, columns), clipped);
        }
    }
}
