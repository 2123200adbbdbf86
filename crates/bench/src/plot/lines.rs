//! Lines over logarithmic axes, and trends over results. An axis with a value of zero or below is linear.

use std::fmt::Write as _;

use super::{CHARACTER, WIDTH, escape, legend, svg, tick_label, ticks};

const LEFT: f64 = 70.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 30.0;
const HEIGHT: f64 = 190.0;
/// Space for the ticks below a plot, upright and tilted.
const TICKS: f64 = 20.0;
const TILTED_TICKS: f64 = 76.0;
/// Distance of the marks of different lines at the same place, and its maximum from the middle.
const STEP: f64 = 3.0;
const MAX_SHIFT: f64 = 9.0;

/// A line of a plot.
pub(crate) struct Line<P = (f64, f64)> {
    pub(crate) label: String,
    /// CSS classes.
    pub(crate) class: String,
    pub(crate) points: Vec<P>,
}

/// A point of a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LinePoint {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// Least and greatest value, if the value has a range.
    pub(crate) range: Option<(f64, f64)>,
}

impl From<(f64, f64)> for LinePoint {
    fn from((x, y): (f64, f64)) -> Self {
        Self { x, y, range: None }
    }
}

/// Titles of a plot of lines.
#[derive(Clone, Copy)]
pub(crate) struct LineTitles<'a> {
    /// What the plot shows; empty if the text around it says so.
    pub(crate) plot: &'a str,
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
}

/// Vertical axis: its ticks, and the positions of values.
struct ValueAxis {
    marks: Vec<f64>,
    is_logarithmic: bool,
}

impl ValueAxis {
    /// Returns a linear axis that contains zero and these values.
    fn linear(values: impl Iterator<Item = f64>) -> Self {
        Self { marks: ticks(values), is_logarithmic: false }
    }

    /// Returns a logarithmic axis of these values; a linear one if a value is not above 0.
    fn logarithmic(values: impl Iterator<Item = f64> + Clone) -> Self {
        let (low, high) =
            values.clone().fold((f64::MAX, f64::MIN), |(low, high), y| (y.min(low), y.max(high)));
        if low <= 0.0 {
            return Self::linear(values);
        }
        Self { marks: marks(low, high), is_logarithmic: true }
    }

    /// Returns the vertical position of a value.
    fn y(&self, value: f64) -> f64 {
        let (bottom, top) =
            (self.marks.first().copied().unwrap_or(0.0), self.marks.last().copied().unwrap_or(1.0));
        let share = if self.is_logarithmic {
            (value / bottom).ln() / (top / bottom).ln()
        } else {
            (value - bottom) / (top - bottom)
        };
        TOP + HEIGHT - share * HEIGHT
    }

    /// Returns the ticks with their positions.
    fn labels(&self) -> Vec<(f64, String)> {
        self.marks.iter().map(|mark| (self.y(*mark), tick_label(*mark))).collect()
    }

    /// Returns the position of zero if values are below it.
    fn zero(&self) -> Option<f64> {
        self.marks.first().is_some_and(|bottom| !self.is_logarithmic && *bottom < 0.0).then(|| self.y(0.0))
    }
}

/// Axes of a plot: titles, and labels by their positions.
struct LineAxes<'a> {
    titles: LineTitles<'a>,
    places: Vec<(f64, String)>,
    marks: Vec<(f64, String)>,
    /// Position of a line at zero, if there are values below it.
    zero: Option<f64>,
    /// Labels of places are long.
    is_tilted: bool,
}

/// Plots lines over logarithmic axes, with their legend; empty without points.
pub(crate) fn lines<P: Copy + Into<LinePoint>>(lines: &[Line<P>], x_title: &str, y_title: &str) -> String {
    let plot = line_panel(lines, LineTitles { plot: "", x: x_title, y: y_title });
    if plot.is_empty() {
        return plot;
    }
    let entries: Vec<_> =
        lines.iter().map(|line| (format!("line {}", line.class), line.label.clone())).collect();
    format!("{plot}{}", legend(&entries))
}

/// Plots lines over logarithmic axes, without their legend; empty without points. The axis of values is linear if one of
/// them is 0 or below.
pub(crate) fn line_panel<P: Copy + Into<LinePoint>>(lines: &[Line<P>], titles: LineTitles<'_>) -> String {
    let all = points(lines);
    let mut places: Vec<f64> = all.iter().flatten().map(|point| point.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let (Some(min), Some(max)) = (places.first(), places.last()) else { return String::new() };
    let span = (max / min).ln();
    let x = |value: f64| if span > 0.0 { (value / min).ln() / span } else { 0.5 };
    let axis = ValueAxis::logarithmic(all.iter().flatten().flat_map(values));
    let axes = LineAxes {
        titles,
        places: places.iter().map(|place| (across(x(*place)), tick_label(*place))).collect(),
        marks: axis.labels(),
        zero: axis.zero(),
        is_tilted: false,
    };
    axes.draw(lines, &all, (&x, &|value| axis.y(value)))
}

/// Plots the values of results on an axis that contains zero, without a legend; empty without points. The places of points
/// are indices of `labels`.
pub(crate) fn trend<P: Copy + Into<LinePoint>>(
    lines: &[Line<P>],
    labels: &[String],
    titles: LineTitles<'_>,
) -> String {
    let all = points(lines);
    if all.iter().all(Vec::is_empty) {
        return String::new();
    }
    let last = labels.len().saturating_sub(1) as f64;
    let x = |index: f64| if last > 0.0 { index / last } else { 0.5 };
    let axis = ValueAxis::linear(all.iter().flatten().flat_map(values));
    let places = labels.iter().enumerate();
    let axes = LineAxes {
        titles,
        places: places.map(|(index, label)| (across(x(index as f64)), label.clone())).collect(),
        marks: axis.labels(),
        zero: axis.zero(),
        is_tilted: true,
    };
    axes.draw(lines, &all, (&x, &|value| axis.y(value)))
}

/// Returns the points of each line.
fn points<P: Copy + Into<LinePoint>>(lines: &[Line<P>]) -> Vec<Vec<LinePoint>> {
    lines.iter().map(|line| line.points.iter().map(|point| (*point).into()).collect()).collect()
}

/// Returns the value of a point, and the ends of its range.
fn values(point: &LinePoint) -> [f64; 3] {
    let (low, high) = point.range.unwrap_or((point.y, point.y));
    [low, point.y, high]
}

/// Returns the position of a share of the horizontal axis.
fn across(share: f64) -> f64 {
    LEFT + 20.0 + share * (WIDTH - LEFT - RIGHT - 40.0)
}

impl LineAxes<'_> {
    /// Draws the axes and the lines. `x` returns the share of the horizontal axis, `y` the position of a value.
    fn draw<P>(
        &self,
        lines: &[Line<P>],
        points: &[Vec<LinePoint>],
        (x, y): (&impl Fn(f64) -> f64, &impl Fn(f64) -> f64),
    ) -> String {
        let mut body = self.frame();
        let middle = (lines.len().saturating_sub(1)) as f64 / 2.0;
        let step = if middle > 0.0 { STEP.min(MAX_SHIFT / middle) } else { 0.0 };
        // Writing to a String cannot fail.
        for (index, (line, points)) in lines.iter().zip(points).enumerate() {
            let shift = (index as f64 - middle) * step;
            let at = |point: &LinePoint| (across(x(point.x)) + shift, y(point.y));
            let path: Vec<String> = points
                .iter()
                .map(at)
                .map(|(horizontal, vertical)| format!("{horizontal:.1} {vertical:.1}"))
                .collect();
            if path.is_empty() {
                continue;
            }
            let class = escape(&line.class);
            let _ = write!(body, r#"<path class="line {class}" d="M{}"/>"#, path.join("L"));
            for point in points {
                let (horizontal, vertical) = at(point);
                if let Some((low, high)) = point.range {
                    let (low, high) = (y(low), y(high));
                    let cap = horizontal - 3.0;
                    let _ = write!(
                        body,
                        r#"<path class="span {class}" d="M{horizontal:.1} {low:.1}V{high:.1}M{cap:.1} {low:.1}h6M{cap:.1} {high:.1}h6"/>"#
                    );
                }
                let _ = write!(
                    body,
                    r#"<circle class="{class}" cx="{horizontal:.1}" cy="{vertical:.1}" r="3"/>"#
                );
            }
        }
        svg(self.height(), &format!("{} {}", self.titles.plot, self.titles.y), &body)
    }

    fn height(&self) -> f64 {
        TOP + HEIGHT + if self.is_tilted { TILTED_TICKS } else { TICKS } + 24.0
    }

    /// Returns titles, grid and ticks.
    fn frame(&self) -> String {
        let LineTitles { plot, x, y } = self.titles;
        let right = WIDTH - RIGHT;
        let mut body = String::new();
        // Writing to a String cannot fail.
        for (height, label) in &self.marks {
            let _ = write!(
                body,
                r#"<path class="grid" d="M{LEFT} {height:.1}H{right}"/><text class="tick" x="{:.0}" y="{:.1}" text-anchor="end">{label}</text>"#,
                LEFT - 6.0,
                height + 4.0
            );
        }
        if let Some(zero) = self.zero {
            let _ = write!(body, r#"<path class="grid zero" d="M{LEFT} {zero:.1}H{right}"/>"#);
        }
        let below = TOP + HEIGHT + 16.0;
        let mut free = 0.0;
        for (place, label) in &self.places {
            let label = escape(label);
            if self.is_tilted {
                let _ = write!(
                    body,
                    r#"<text class="tick" x="{place:.1}" y="{below:.0}" text-anchor="end" transform="rotate(-40 {place:.1} {below:.0})">{label}</text>"#
                );
                continue;
            }
            let half = CHARACTER / 2.0 * label.len() as f64;
            if place - half >= free {
                let _ = write!(
                    body,
                    r#"<text class="tick" x="{place:.1}" y="{below:.0}" text-anchor="middle">{label}</text>"#
                );
                free = place + half + 4.0;
            }
        }
        let _ = write!(
            body,
            r#"<text class="group" x="0" y="15">{}</text><text class="axis" x="{:.0}" y="{:.0}" text-anchor="middle">{}</text>"#,
            escape(plot),
            f64::midpoint(LEFT, right),
            self.height() - 8.0,
            escape(x)
        );
        let middle = TOP + HEIGHT / 2.0;
        let _ = write!(
            body,
            r#"<text class="axis" x="10" y="{middle:.0}" text-anchor="middle" transform="rotate(-90 10 {middle:.0})">{}</text>"#,
            escape(y)
        );
        body
    }
}

/// Returns at least two marks of a logarithmic axis that enclose the values: 1, 2 or 5 times a power of ten.
fn marks(lowest: f64, highest: f64) -> Vec<f64> {
    // The quotient of whole numbers is the value nearest to the decimal number; a product with 0.1 is not.
    let mark = |step: f64, power: i32| match power {
        ..0 => step / 10_f64.powi(-power),
        _ => step * 10_f64.powi(power),
    };
    let all: Vec<f64> = (-3..12).flat_map(|power| [1.0, 2.0, 5.0].map(|step| mark(step, power))).collect();
    let from = all.iter().rposition(|mark| *mark <= lowest).unwrap_or(0);
    let to = all.iter().position(|mark| *mark >= highest).unwrap_or(all.len() - 1);
    all[from..=to.max(from + 1).min(all.len() - 1)].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TITLES: LineTitles<'static> =
        LineTitles { plot: "P99 <of> x", x: "connections", y: "latency, µs" };

    fn line(points: Vec<LinePoint>) -> Line<LinePoint> {
        Line { label: "p".to_owned(), class: "c".to_owned(), points }
    }

    #[test]
    fn axes_have_round_bounds() {
        assert_eq!(marks(130.0, 401.0), [100.0, 200.0, 500.0]);
        assert_eq!(marks(0.2, 1.0), [0.2, 0.5, 1.0]);
        assert_eq!(marks(500.0, 500.0), [500.0, 1_000.0]);
    }

    #[test]
    fn plotted_points_lie_between_the_axes_which_have_titles_and_ticks() {
        let points = vec![(2.0, 100.0).into(), (64.0, 10.0).into()];
        let svg = line_panel(&[line(points)], TITLES);
        assert!(svg.contains(r#"cx="90.0" cy="30.0""#) && svg.contains(r#"cx="368.0" cy="220.0""#), "{svg}");
        for text in [">2</text>", ">64</text>", ">10</text>", ">20</text>", ">100</text>"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        assert!(svg.contains(">connections</text>") && svg.contains(">latency, µs</text>"), "{svg}");
        assert!(svg.contains(r#"<text class="group" x="0" y="15">P99 &lt;of&gt; x</text>"#), "{svg}");
        assert_eq!(line_panel::<LinePoint>(&[], TITLES), "");
    }

    #[test]
    fn ranges_are_drawn_and_the_marks_of_two_lines_do_not_hide_each_other() {
        let point = LinePoint { x: 2.0, y: 20.0, range: Some((10.0, 100.0)) };
        let svg = line_panel(&[line(vec![point]), line(vec![point])], TITLES);
        assert_eq!(svg.matches(r#"<path class="span c""#).count(), 2, "{svg}");
        assert!(
            svg.contains(r#"d="M227.5 220.0V30.0M"#) && svg.contains(r#"d="M230.5 220.0V30.0M"#),
            "{svg}"
        );
        // With a value below zero, the axis is linear: from -50 to 100.
        let svg =
            line_panel(&[line(vec![LinePoint { y: 0.0, range: Some((-50.0, 100.0)), ..point }])], TITLES);
        assert!(svg.contains("220.0V30.0") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(
            svg.contains(r#"cy="156.7""#) && svg.contains(r#"<path class="grid zero" d="M70 156.7H388"/>"#),
            "{svg}"
        );
        assert!(svg.contains(">-50</text>"), "{svg}");
    }

    #[test]
    fn lines_have_a_legend_below_the_plot() {
        let text = lines(&[line(vec![(1.0, 2.0).into()])], "x", "y");
        assert!(
            text.contains(r#"</svg><ul class="legend"><li><span class="key line c"></span>p</li></ul>"#),
            "{text}"
        );
        assert_eq!(lines::<LinePoint>(&[], "x", "y"), "");
    }

    #[test]
    fn a_trend_begins_at_zero_and_has_all_labels() {
        let labels = ["abc", "d<f"].map(str::to_owned);
        let svg = trend(&[line(vec![(0.0, 50.0).into(), (1.0, 100.0).into()])], &labels, TITLES);
        assert!(svg.contains(r#"d="M90.0 125.0L368.0 30.0""#), "{svg}");
        assert!(svg.contains(">abc</text>") && svg.contains(">d&lt;f</text>"), "{svg}");
        assert!(svg.contains(">0</text>") && svg.contains(">100</text>"), "{svg}");
        assert_eq!(trend::<LinePoint>(&[], &labels, TITLES), "");
    }
}
