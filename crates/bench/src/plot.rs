//! Plots as SVG: horizontal bars, and lines with logarithmic axes. The style sheet of the page defines the colours.

use std::fmt::Write as _;

/// Escapes text for HTML and SVG.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            _ => safe.push(character),
        }
    }
    safe
}

/// A bar of several parts.
pub(crate) struct Bar {
    pub(crate) label: String,
    /// Length and CSS class of each part.
    pub(crate) parts: Vec<(f64, String)>,
    /// Minimum and maximum of the sum.
    pub(crate) range: (f64, f64),
}

/// Plots bars under headings, all on one scale that begins at zero.
pub(crate) fn bars(groups: &[(String, Vec<Bar>)], digits: usize) -> String {
    const LEFT: f64 = 190.0;
    const WIDTH: f64 = 480.0;
    const LINE: f64 = 22.0;
    let all = || groups.iter().flat_map(|(_, bars)| bars);
    let max = all().map(|bar| bar.range.1).fold(f64::MIN_POSITIVE, f64::max);
    let scale = |value: f64| value.max(0.0) / max * WIDTH;
    let mut body = String::new();
    let mut y = 0.0;
    // Writing to a String cannot fail.
    for (title, bars) in groups {
        let _ = write!(body, r#"<text class="group" x="0" y="{:.0}">{}</text>"#, y + 15.0, escape(title));
        y += LINE;
        for bar in bars {
            let _ = write!(
                body,
                r#"<text x="{}" y="{:.0}" text-anchor="end">{}</text>"#,
                LEFT - 8.0,
                y + 14.0,
                escape(&bar.label)
            );
            let mut x = LEFT;
            let mut whole = 0.0;
            for (length, class) in &bar.parts {
                let width = scale(*length);
                let _ = write!(
                    body,
                    r#"<rect class="{}" x="{x:.1}" y="{:.0}" width="{width:.1}" height="16"/>"#,
                    escape(class),
                    y + 2.0
                );
                x += width;
                whole += length;
            }
            let (low, high) = (LEFT + scale(bar.range.0), LEFT + scale(bar.range.1));
            let middle = y + 10.0;
            let _ = write!(
                body,
                r#"<path class="range" d="M{low:.1} {middle:.0}H{high:.1}"/><text x="{:.1}" y="{:.0}">{whole:.digits$}</text>"#,
                high.max(x) + 6.0,
                y + 14.0
            );
            y += LINE;
        }
        y += 6.0;
    }
    let width = LEFT + WIDTH + 70.0;
    format!(r#"<svg viewBox="0 0 {width:.0} {y:.0}" width="{width:.0}" role="img">{body}</svg>"#)
}

/// A line of a plot.
pub(crate) struct Line {
    pub(crate) label: String,
    /// CSS classes.
    pub(crate) class: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Plots lines over two logarithmic axes; empty without points.
pub(crate) fn lines(lines: &[Line], x_title: &str, y_title: &str) -> String {
    const LEFT: f64 = 60.0;
    const TOP: f64 = 26.0;
    const WIDTH: f64 = 460.0;
    const HEIGHT: f64 = 240.0;
    let points = || lines.iter().flat_map(|line| &line.points);
    let mut places: Vec<f64> = points().map(|(x, _)| *x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let (Some(min), Some(max)) = (places.first(), places.last()) else { return String::new() };
    let span = (max / min).ln();
    let x = |value: f64| {
        let share = if span > 0.0 { (value / min).ln() / span } else { 0.5 };
        LEFT + 20.0 + share * (WIDTH - 40.0)
    };
    let (bottom, top) = points().fold((f64::MAX, 1.0_f64), |(low, high), (_, y)| (low.min(*y), high.max(*y)));
    let marks = marks(bottom, top);
    let (Some(bottom), Some(top)) = (marks.first(), marks.last()) else { return String::new() };
    let y = |value: f64| TOP + HEIGHT - (value.max(*bottom) / bottom).ln() / (top / bottom).ln() * HEIGHT;
    let mut body = String::new();
    // Writing to a String cannot fail.
    for mark in &marks {
        let _ = write!(
            body,
            r#"<path class="grid" d="M{LEFT} {0:.1}H{1:.1}"/><text x="{2}" y="{3:.1}" text-anchor="end">{mark}</text>"#,
            y(*mark),
            LEFT + WIDTH,
            LEFT - 6.0,
            y(*mark) + 4.0
        );
    }
    for place in &places {
        let _ = write!(
            body,
            r#"<text x="{:.1}" y="{:.0}" text-anchor="middle">{place}</text>"#,
            x(*place),
            TOP + HEIGHT + 18.0
        );
    }
    for (index, line) in lines.iter().enumerate() {
        let path: Vec<String> =
            line.points.iter().map(|(px, py)| format!("{:.1} {:.1}", x(*px), y(*py))).collect();
        let class = escape(&line.class);
        let _ = write!(body, r#"<path class="line {class}" d="M{}"/>"#, path.join("L"));
        for (px, py) in &line.points {
            let _ = write!(body, r#"<circle class="{class}" cx="{:.1}" cy="{:.1}" r="3"/>"#, x(*px), y(*py));
        }
        let (at, height) = (LEFT + WIDTH + 14.0, TOP + 10.0 + 18.0 * index as f64);
        let _ = write!(
            body,
            r#"<path class="line {class}" d="M{at} {0:.0}h24"/><text x="{1}" y="{2:.0}">{3}</text>"#,
            height,
            at + 30.0,
            height + 4.0,
            escape(&line.label)
        );
    }
    let height = (TOP + HEIGHT + 42.0).max(TOP + 20.0 + 18.0 * lines.len() as f64);
    let width = LEFT + WIDTH + 320.0;
    format!(
        r#"<svg viewBox="0 0 {width:.0} {height:.0}" width="{width:.0}" role="img">{body}<text x="{:.0}" y="{:.0}" text-anchor="middle">{}</text><text x="{LEFT}" y="14">{}</text></svg>"#,
        LEFT + WIDTH / 2.0,
        TOP + HEIGHT + 36.0,
        escape(x_title),
        escape(y_title)
    )
}

/// Plots values as a small line that begins at zero, without axes. Missing values are left out.
pub(crate) fn sparkline(values: &[Option<f64>]) -> String {
    const WIDTH: f64 = 120.0;
    const HEIGHT: f64 = 24.0;
    let max = values.iter().flatten().copied().fold(f64::MIN_POSITIVE, f64::max);
    let step = WIDTH / (values.len().max(2) - 1) as f64;
    let point = |(index, value): (usize, &Option<f64>)| {
        let height = HEIGHT - value.as_ref()?.max(0.0) / max * HEIGHT;
        Some(format!("{:.1} {height:.1}", index as f64 * step))
    };
    let points: Vec<String> = values.iter().enumerate().filter_map(point).collect();
    format!(
        r#"<svg viewBox="-2 -2 {:.0} {:.0}" width="{:.0}" role="img"><path class="line peer1" d="M{}"/></svg>"#,
        WIDTH + 4.0,
        HEIGHT + 4.0,
        WIDTH + 4.0,
        points.join("L")
    )
}

/// Returns at least two marks of an axis that enclose the values: 1, 2 or 5 times a power of ten, from 1 on.
fn marks(lowest: f64, highest: f64) -> Vec<f64> {
    let all: Vec<f64> =
        (0..12).flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * 10_f64.powi(power))).collect();
    let from = all.iter().rposition(|mark| *mark <= lowest).unwrap_or(0);
    let to = all.iter().position(|mark| *mark >= highest).unwrap_or(all.len() - 1);
    all[from..=to.max(from + 1).min(all.len() - 1)].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_bounds() {
        assert_eq!(marks(130.0, 401.0), [100.0, 200.0, 500.0]);
        assert_eq!(marks(0.2, 1.0), [1.0, 2.0]);
        assert_eq!(marks(500.0, 500.0), [500.0, 1_000.0]);
    }

    #[test]
    fn bars_fill_the_width_and_text_is_escaped() {
        let bar = |label: &str, length: f64| Bar {
            label: label.to_owned(),
            parts: vec![(length / 2.0, "user".to_owned()), (length / 2.0, "kernel".to_owned())],
            range: (length, length),
        };
        let svg = bars(&[("a <b>".to_owned(), vec![bar("x&y", 10.0), bar("z", 20.0)])], 1);
        assert!(svg.contains("a &lt;b&gt;") && svg.contains("x&amp;y"), "{svg}");
        assert_eq!(svg.matches(r#"width="240.0""#).count(), 2, "{svg}");
        assert_eq!(svg.matches(r#"width="120.0""#).count(), 2, "{svg}");
    }

    #[test]
    fn a_sparkline_begins_at_zero_and_leaves_out_missing_values() {
        let svg = sparkline(&[Some(10.0), None, Some(20.0)]);
        assert!(svg.contains(r#"d="M0.0 12.0L120.0 0.0""#), "{svg}");
        assert!(!sparkline(&[Some(0.0)]).contains("NaN") && !sparkline(&[]).contains("NaN"));
    }

    #[test]
    fn plotted_points_lie_between_the_axes() {
        let line =
            Line { label: "p".to_owned(), class: "c".to_owned(), points: vec![(2.0, 100.0), (64.0, 10.0)] };
        let svg = lines(&[line], "x", "y");
        assert!(svg.contains(r#"cx="80.0" cy="26.0""#) && svg.contains(r#"cx="500.0" cy="266.0""#), "{svg}");
        assert_eq!(lines(&[], "x", "y"), "");
    }
}
