//! Horizontal bars on one scale. It begins at zero, or at the least value if that is negative.

use std::fmt::Write as _;

use super::{CHARACTER, WIDTH, escape, svg, tick_label, ticks};

/// Maximum number of characters of a label at the left of its bar. A longer label is above its bar.
const SHORT_LABEL: usize = 16;
/// Maximum number of characters of a label.
const MAX_LABEL: usize = 56;
/// Space for the numbers at the right of bars.
const NUMBERS: f64 = 76.0;
/// Height of a line of text, and of a bar with the space below it.
const LINE: f64 = 20.0;
/// Published values are drawn up to this multiple of the greatest value that was measured.
const MAX_PUBLISHED: f64 = 4.0;

/// A bar of several parts.
pub(crate) struct Bar {
    pub(crate) label: String,
    /// Length and CSS class of each part. The class `published` stands for a value that was not measured here.
    pub(crate) parts: Vec<(f64, String)>,
    /// Minimum and maximum of the sum.
    pub(crate) range: (f64, f64),
}

/// Axis of bars.
pub(crate) struct BarAxis {
    /// What the plot shows, above it; empty if the text around it says so.
    pub(crate) plot: String,
    /// What the bars show, with its unit; empty if the text around the plot says so.
    pub(crate) title: String,
    /// Number of decimals of the numbers beside bars.
    pub(crate) digits: usize,
}

impl From<usize> for BarAxis {
    fn from(digits: usize) -> Self {
        Self { plot: String::new(), title: String::new(), digits }
    }
}

impl Bar {
    fn is_published(&self) -> bool {
        self.parts.iter().any(|(_, class)| class.contains("published"))
    }

    /// Returns the sum of the negative parts, and that of the others.
    fn ends(&self) -> [f64; 2] {
        let sum = |limit: fn(f64, f64) -> f64| self.parts.iter().map(|(length, _)| limit(*length, 0.0)).sum();
        [sum(f64::min), sum(f64::max)]
    }

    fn has_short_label(&self) -> bool {
        self.label.chars().count() <= SHORT_LABEL
    }

    /// Returns the label, cut in its middle if it is too long. Its end may be the number of a source.
    fn shown_label(&self) -> String {
        let characters: Vec<char> = self.label.chars().collect();
        if characters.len() <= MAX_LABEL {
            return self.label.clone();
        }
        let end = MAX_LABEL / 4;
        let (start, end) = (&characters[..MAX_LABEL - end - 1], &characters[characters.len() - end..]);
        format!("{}…{}", start.iter().collect::<String>(), end.iter().collect::<String>())
    }
}

/// Positions of values.
struct BarScale {
    left: f64,
    width: f64,
    /// Values at the left and at the right end.
    bottom: f64,
    top: f64,
}

impl BarScale {
    fn x(&self, value: f64) -> f64 {
        self.left + ((value - self.bottom) / (self.top - self.bottom)).clamp(0.0, 1.0) * self.width
    }
}

/// Plots bars under headings, all on one scale that contains zero. A published value far beyond the measured ones ends at
/// the edge of the plot with an arrow. Returns an empty text without bars.
pub(crate) fn bars(groups: &[(String, Vec<Bar>)], axis: impl Into<BarAxis>) -> String {
    let axis = axis.into();
    let all = || groups.iter().flat_map(|(_, bars)| bars);
    if all().next().is_none() {
        return String::new();
    }
    let greatest = |is_published: bool| {
        let of = all().filter(|bar| bar.is_published() == is_published);
        of.flat_map(|bar| [bar.range.1, bar.ends()[1]]).fold(0.0, f64::max)
    };
    let (measured, published) = (greatest(false), greatest(true));
    let limit = if measured > 0.0 { MAX_PUBLISHED * measured } else { published };
    let least = all().flat_map(|bar| [bar.range.0, bar.ends()[0]]).fold(0.0, f64::min);
    let marks = ticks([least, measured.max(published.min(limit))]);
    let labels = all().filter(|bar| bar.has_short_label()).map(|bar| bar.label.chars().count());
    let left = labels.max().map_or(6.0, |longest| 12.0 + CHARACTER * longest as f64);
    let scale = BarScale {
        left,
        width: WIDTH - NUMBERS - left,
        bottom: marks.first().copied().unwrap_or_default(),
        top: marks.last().copied().unwrap_or(1.0),
    };
    let mut body = String::new();
    let mut y = 4.0;
    // Writing to a String cannot fail.
    if !axis.plot.is_empty() {
        let _ = write!(body, r#"<text class="group" x="0" y="15">{}</text>"#, escape(&axis.plot));
        y += LINE;
    }
    let top = y - 4.0;
    for (title, bars) in groups {
        if !title.is_empty() {
            let _ = write!(body, r#"<text class="group" x="0" y="{:.0}">{}</text>"#, y + 15.0, escape(title));
            y += LINE + 2.0;
        }
        for bar in bars {
            y = draw(&mut body, bar, (&scale, axis.digits), y);
        }
        y += 6.0;
    }
    let mut below = String::new();
    // Long labels have no place at each tick.
    let longest = marks.iter().map(|mark| tick_label(*mark).len()).max().unwrap_or_default();
    let distance = scale.width / marks.len().saturating_sub(1).max(1) as f64;
    let every = ((CHARACTER * longest as f64 + 6.0) / distance).ceil().max(1.0) as usize;
    for (index, mark) in marks.iter().enumerate() {
        let (x, label) = (scale.x(*mark), tick_label(*mark));
        let class = if *mark == 0.0 && scale.bottom < 0.0 { "grid zero" } else { "grid" };
        let _ = write!(below, r#"<path class="{class}" d="M{x:.1} {top:.0}V{y:.0}"/>"#);
        if index.is_multiple_of(every) {
            let _ = write!(
                below,
                r#"<text class="tick" x="{x:.1}" y="{:.0}" text-anchor="middle">{label}</text>"#,
                y + 15.0
            );
        }
    }
    y += LINE;
    if !axis.title.is_empty() {
        let _ = write!(
            below,
            r#"<text class="axis" x="{:.0}" y="{:.0}" text-anchor="middle">{}</text>"#,
            WIDTH / 2.0,
            y + 15.0,
            escape(&axis.title)
        );
        y += LINE + 2.0;
    }
    // The grid is below the bars.
    svg(y, &axis.title, &format!("{below}{body}"))
}

/// Draws a bar from `y` on. Returns the end of its line.
fn draw(body: &mut String, bar: &Bar, (scale, digits): (&BarScale, usize), mut y: f64) -> f64 {
    let (x, anchor) = if bar.has_short_label() { (scale.left - 6.0, "end") } else { (0.0, "start") };
    // Writing to a String cannot fail.
    let _ = write!(
        body,
        r#"<text x="{x:.0}" y="{:.0}" text-anchor="{anchor}">{}</text>"#,
        y + 14.0,
        escape(&bar.shown_label())
    );
    if !bar.has_short_label() {
        y += LINE - 2.0;
    }
    // Negative parts are at the left of zero, each at the left of the one before it.
    let (mut below, mut above) = (0.0, 0.0);
    for (length, class) in &bar.parts {
        let side = if *length < 0.0 { &mut below } else { &mut above };
        let ends = [scale.x(*side), scale.x(*side + length)];
        *side += length;
        let _ = write!(
            body,
            r#"<rect class="{}" x="{:.1}" y="{:.0}" width="{:.1}" height="14"/>"#,
            escape(class),
            ends[0].min(ends[1]),
            y + 3.0,
            (ends[1] - ends[0]).abs()
        );
    }
    let whole = below + above;
    let (low, high) = (scale.x(bar.range.0), scale.x(bar.range.1));
    let middle = y + 10.0;
    let class = bar.parts.first().map_or("", |(_, class)| class);
    if bar.is_published() {
        let mark = if whole > scale.top {
            format!(
                r#"<path class="beyond {0}" d="M{high:.1} {1:.0}l8 5l-8 5"/>"#,
                escape(class),
                middle - 5.0
            )
        } else {
            format!(r#"<circle class="{0}" cx="{high:.1}" cy="{middle:.0}" r="4"/>"#, escape(class))
        };
        body.push_str(&mark);
    } else {
        let cap = middle - 4.0;
        let _ = write!(
            body,
            r#"<path class="range" d="M{low:.1} {middle:.0}H{high:.1}M{low:.1} {cap:.0}v8M{high:.1} {cap:.0}v8"/>"#
        );
    }
    let end = high.max(scale.x(above)) + 12.0;
    let _ = write!(body, r#"<text x="{end:.1}" y="{:.0}">{whole:.digits$}</text>"#, y + 14.0);
    y + LINE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(label: &str, parts: &[(f64, &str)], range: (f64, f64)) -> Bar {
        let parts = parts.iter().map(|(length, class)| (*length, (*class).to_owned())).collect();
        Bar { label: label.to_owned(), parts, range }
    }

    fn axis() -> BarAxis {
        BarAxis { plot: String::new(), title: "CPU time, µs".to_owned(), digits: 1 }
    }

    #[test]
    fn bars_have_an_axis_with_title_and_ticks_and_text_is_escaped() {
        let bars = vec![
            bar("x&y", &[(5.0, "user"), (5.0, "kernel")], (10.0, 10.0)),
            bar("z", &[(10.0, "user"), (10.0, "kernel")], (20.0, 20.0)),
        ];
        let text = super::bars(&[("a <b>".to_owned(), bars)], axis());
        assert!(text.contains("a &lt;b&gt;") && text.contains("x&amp;y"), "{text}");
        assert!(text.contains(r#"text-anchor="middle">CPU time, µs</text>"#), "{text}");
        for tick in ["0", "5", "10", "15", "20"] {
            assert!(text.contains(&format!(r#"text-anchor="middle">{tick}</text>"#)), "{tick}: {text}");
        }
        // The greatest value is a tick, so its bar has the whole width: 400 - 76 - (12 + 3 * 7).
        assert_eq!(text.matches(r#"width="145.5""#).count(), 2, "{text}");
        assert_eq!(text.matches(r#"width="72.8""#).count(), 2, "{text}");
        let named = BarAxis { plot: "CPU <time>".to_owned(), ..axis() };
        let text = super::bars(&[(String::new(), vec![bar("z", &[(1.0, "user")], (1.0, 1.0))])], named);
        assert!(text.contains(r#"<text class="group" x="0" y="15">CPU &lt;time&gt;</text>"#), "{text}");
        let wide = vec![bar("gateways-shared", &[(490_000.0, "user")], (490_000.0, 490_000.0))];
        let text = super::bars(&[(String::new(), wide)], axis());
        assert_eq!(text.matches(r#"class="grid""#).count(), 6, "{text}");
        assert!(text.contains(">0</text>") && text.contains(">200,000</text>"), "{text}");
        assert!(!text.contains(">100,000</text>"), "it would touch its neighbours: {text}");
        assert_eq!(super::bars(&[("empty".to_owned(), Vec::new())], axis()), "");
    }

    #[test]
    fn ranges_are_lines_from_the_least_to_the_greatest_value() {
        let text = bars(&[(String::new(), vec![bar("p", &[(10.0, "peer0")], (5.0, 20.0))])], axis());
        // The bar begins at 19 and has 305 units for the value 20.
        assert!(text.contains(r#"<path class="range" d="M95.2 14H324.0M95.2 10v8M324.0 10v8"/>"#), "{text}");
    }

    #[test]
    fn negative_values_are_at_the_left_of_zero() {
        let less = bar("less", &[(-10.0, "peer0")], (-20.0, 5.0));
        let parts = bar("parts", &[(20.0, "peer0"), (-10.0, "peer1")], (10.0, 10.0));
        let text = bars(&[(String::new(), vec![less, parts])], axis());
        // From -20 to 20 over 277 units from 47 on.
        for drawn in [
            r#"<path class="grid zero" d="M185.5 "#,
            r#"<rect class="peer0" x="116.2" y="7" width="69.2""#,
            r#"<path class="range" d="M47.0 14H220.1"#,
            r#"<rect class="peer1" x="116.2" y="27" width="69.2""#,
            ">-20</text>",
            ">-10.0</text>",
            ">10.0</text>",
        ] {
            assert!(text.contains(drawn), "{drawn}: {text}");
        }
    }

    #[test]
    fn published_values_are_marks_without_a_range_and_do_not_hide_the_measured_ones() {
        let published = |value: f64| bar("Other [1]", &[(value, "published0 published")], (value, value));
        let plot = |value: f64| {
            let measured = bar("p", &[(10.0, "peer0")], (10.0, 10.0));
            bars(&[(String::new(), vec![measured, published(value)])], axis())
        };
        let near = plot(20.0);
        assert!(
            near.contains(r#"<circle class="published0 published""#) && near.contains(">20.0<"),
            "{near}"
        );
        assert_eq!(near.matches(r#"class="range""#).count(), 1, "{near}");
        let far = plot(5_000.0);
        assert!(far.contains(r#"<path class="beyond published0 published""#), "{far}");
        assert!(far.contains(">5000.0<") && !far.contains(">1,000<") && !far.contains("<circle"), "{far}");
    }

    #[test]
    fn long_labels_are_above_their_bars_and_keep_their_end() {
        let label = format!("{} [12]", "x".repeat(70));
        let text = bars(&[(String::new(), vec![bar(&label, &[(1.0, "peer0")], (1.0, 1.0))])], axis());
        assert!(text.contains("…") && text.contains(" [12]</text>") && !text.contains(&label), "{text}");
        assert!(text.contains(r#"<text x="0" y="18" text-anchor="start">"#), "{text}");
    }
}
