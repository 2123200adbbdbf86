//! Plots as SVG: horizontal bars, lines over logarithmic axes, and trends over results. The style sheet of the page
//! defines the colours.
//!
//! A plot has axes with titles and ticks. It is narrow, so that its text is legible on a telephone. Legends are HTML below
//! the plot, which wraps.

mod bars;
mod lines;

use std::fmt::Write as _;

pub(crate) use self::{
    bars::{Bar, BarAxis, bars},
    lines::{Line, LinePoint, LineTitles, line_panel, lines, trend},
};

/// Width of all plots with axes, in the units of their text size.
const WIDTH: f64 = 400.0;
/// Width of a character in these units, on average.
const CHARACTER: f64 = 7.0;

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

/// Returns the legend of plots: CSS classes of the marks with their meaning. Repeated entries are shown once.
pub(crate) fn legend(entries: &[(String, String)]) -> String {
    let mut text = String::new();
    for (index, (class, label)) in entries.iter().enumerate() {
        if !entries[..index].iter().any(|(_, earlier)| earlier == label) {
            // Writing to a String cannot fail.
            let _ = write!(text, r#"<li><span class="key {}"></span>{}</li>"#, escape(class), escape(label));
        }
    }
    if text.is_empty() { text } else { format!(r#"<ul class="legend">{text}</ul>"#) }
}

/// Returns a plot with these elements. `label` describes it to those who cannot see it.
fn svg(height: f64, label: &str, body: &str) -> String {
    format!(
        r#"<svg viewBox="0 0 {WIDTH:.0} {height:.0}" width="{WIDTH:.0}" role="img" aria-label="{}">{body}</svg>"#,
        escape(label)
    )
}

/// Returns the ticks of an axis that contains zero and these values: four to seven, in steps of 1, 2 or 5 times a power of
/// ten. The first one is below zero only if a value is.
fn ticks(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let (min, max) =
        values.into_iter().fold((0.0, 0.0), |(min, max): (f64, f64), value| (min.min(value), max.max(value)));
    if max - min <= 0.0 {
        return vec![0.0, 1.0];
    }
    let rough = (max - min).max(1e-9) / 5.0;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    // The division of a multiple of the step may be slightly beyond a whole number.
    let (below, above) = ((-min / step - 1e-9).ceil() as i32, (max / step - 1e-9).ceil() as i32);
    (-below.max(0)..=above.max(0)).map(|index| f64::from(index) * step).collect()
}

/// Formats the value of a tick: with commas between thousands, and without zeros at its end.
pub(crate) fn tick_label(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, fraction) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut label = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) && !label.ends_with('-') {
            label.push(',');
        }
        label.push(digit);
    }
    label.push_str(fraction);
    label
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_enclose_the_values() {
        assert_eq!(ticks([20.0]), [0.0, 5.0, 10.0, 15.0, 20.0]);
        assert_eq!(ticks([1_237.0]), [0.0, 500.0, 1_000.0, 1_500.0]);
        assert_eq!(ticks([0.4]).len(), 5);
        assert_eq!(ticks([-7.0, 12.0]), [-10.0, -5.0, 0.0, 5.0, 10.0, 15.0]);
        assert_eq!(ticks([-30.0]), [-30.0, -20.0, -10.0, 0.0]);
        for max in [0.0, 1e-12, 3.0, 7.0, 99.0, 123_456.0] {
            let ticks = ticks([max]);
            assert!((2..=7).contains(&ticks.len()) && ticks.last() >= Some(&max), "{max}: {ticks:?}");
        }
    }

    #[test]
    fn ticks_are_labelled_with_commas_and_without_zeros_at_their_end() {
        let values = [0.0, 0.30000000000000004, 2.5, 100.0, 1_000.0, 1_234_567.0];
        assert_eq!(values.map(tick_label), ["0", "0.3", "2.5", "100", "1,000", "1,234,567"]);
    }

    #[test]
    fn a_legend_has_each_meaning_once() {
        let entry = |class: &str, label: &str| (class.to_owned(), label.to_owned());
        let text = legend(&[entry("peer0", "a & b"), entry("peer1", "c"), entry("peer0", "a & b")]);
        assert_eq!(text.matches("<li>").count(), 2, "{text}");
        assert!(text.contains(r#"<span class="key peer0"></span>a &amp; b</li>"#), "{text}");
        assert_eq!(legend(&[]), "");
    }
}
