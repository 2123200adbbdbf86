//! Flame graphs: stacks of `perf script`, folded into a tree, as a self-contained SVG.
//!
//! The width of a frame is its share of the samples. Callers are below the functions that they call, threads at the bottom.

use std::{collections::BTreeMap, fmt::Write as _};

use crate::plot::escape;

/// Width of the drawing, height of a frame, and height of the heading.
const WIDTH: f64 = 1_200.0;
const LINE: f64 = 17.0;
const HEAD: f64 = 50.0;
/// Mean width of a character.
const CHARACTER: f64 = 7.2;
/// Minimum width of a frame that is drawn.
const LEAST: f64 = 0.4;
/// Name of a function without a symbol.
const UNKNOWN: &str = "[unknown]";

/// A function with the samples of all stacks that have it in the same place.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct FlameFrame {
    pub(crate) samples: u64,
    children: BTreeMap<String, FlameFrame>,
}

impl FlameFrame {
    /// Folds the output of `perf script -F comm,ip,sym`. Blocks are separated by empty lines. The first line of a block is the
    /// name of the thread. The others are frames, from the innermost to the outermost: address and function.
    pub(crate) fn fold(script: &str) -> Self {
        let mut root = Self::default();
        for block in script.split("\n\n") {
            let mut lines = block.lines().filter(|line| !line.trim().is_empty());
            let Some(thread) = lines.next() else { continue };
            let frames: Vec<&str> = lines.map(function).collect();
            let mut frame = &mut root;
            frame.samples += 1;
            for name in std::iter::once(thread.trim()).chain(frames.into_iter().rev()) {
                frame = frame.children.entry(name.to_owned()).or_default();
                frame.samples += 1;
            }
        }
        root
    }

    /// Returns the number of frames above each other.
    fn depth(&self) -> usize {
        self.children.values().map(|child| 1 + child.depth()).max().unwrap_or_default()
    }

    /// Returns the drawing with a heading.
    pub(crate) fn svg(&self, title: &str, subtitle: &str) -> String {
        let height = HEAD + LINE * (self.depth() + 1) as f64;
        let mut body = String::new();
        self.draw_children((0.0, height - LINE), WIDTH / self.samples.max(1) as f64, self.samples, &mut body);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
             font-size=\"12\"><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\
             <text x=\"6\" y=\"20\" font-size=\"16\">{}</text><text x=\"6\" y=\"38\">{}</text>{body}</svg>\n",
            escape(title),
            escape(subtitle)
        )
    }

    /// Draws the functions that this one calls, from the left, in the order of their names. `scale` is the width of a sample.
    fn draw_children(&self, (left, y): (f64, f64), scale: f64, all: u64, body: &mut String) {
        let mut x = left;
        for (name, child) in &self.children {
            let width = child.samples as f64 * scale;
            if width >= LEAST {
                child.draw(name, (x, y, width), all, body);
                child.draw_children((x, y - LINE), scale, all, body);
            }
            x += width;
        }
    }

    fn draw(&self, name: &str, (x, y, width): (f64, f64, f64), all: u64, body: &mut String) {
        let percent = self.samples as f64 * 100.0 / all.max(1) as f64;
        // Writing to a String cannot fail.
        let _ = write!(
            body,
            "<g><title>{} ({} of {all} samples, {percent:.1} %)</title><rect x=\"{x:.1}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"16\" \
             fill=\"{}\" stroke=\"#fff\" stroke-width=\"0.3\"/>",
            escape(name),
            self.samples,
            colour(name)
        );
        let room = ((width - 4.0) / CHARACTER).max(0.0) as usize;
        if room >= 3 {
            let length = name.chars().count();
            let shown: String = name.chars().take(if length > room { room - 1 } else { room }).collect();
            let more = if length > room { "…" } else { "" };
            let _ = write!(
                body,
                "<text x=\"{:.1}\" y=\"{:.0}\">{}{more}</text>",
                x + 2.0,
                y + 12.0,
                escape(&shown)
            );
        }
        body.push_str("</g>");
    }
}

/// Returns the function of a line with an address and a function.
fn function(line: &str) -> &str {
    line.trim().split_once(' ').map_or(UNKNOWN, |(_, name)| name.trim())
}

/// Returns a warm colour that depends on the name alone, so a function has the same colour in all drawings.
fn colour(name: &str) -> String {
    let hash = name.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    format!("hsl({} 80% {}%)", 20 + hash % 36, 62 + hash / 36 % 14)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCRIPT: &str = "\
worker-0 \n\t  7f459 write\n\t  55aa <core::A as B>::send\n\t  1 main\n\n\
worker-0 \n\t  7f459 read\n\t  55aa <core::A as B>::send\n\t  1 main\n\n\
control \n\t  3 \n\n";

    #[test]
    fn stacks_with_the_same_callers_are_folded() {
        let root = FlameFrame::fold(SCRIPT);
        assert_eq!((root.samples, root.depth()), (3, 4));
        let send = &root.children["worker-0"].children["main"].children["<core::A as B>::send"];
        assert_eq!((send.samples, send.children.len()), (2, 2));
        assert!(send.children.contains_key("read") && send.children.contains_key("write"));
        assert_eq!(root.children["control"].children[UNKNOWN].samples, 1);
        assert_eq!(FlameFrame::fold("\n\n"), FlameFrame::default());
    }

    #[test]
    fn the_drawing_has_each_frame_with_its_share() {
        let svg = FlameFrame::fold(SCRIPT).svg("a & b", "3 samples");
        assert_eq!((svg.matches("<rect").count(), svg.matches("</g>").count()), (8, 7), "{svg}");
        for text in [
            "a &amp; b",
            "&lt;core::A as B&gt;::send (2 of 3 samples, 66.7 %)",
            "width=\"800.0\"",
            ">main</text>",
        ] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        let narrow = FlameFrame::fold(&SCRIPT.replace("main", &"x".repeat(200))).svg("", "");
        assert!(narrow.contains("xx…</text>"), "{narrow}");
        for outside in ["<script", "href=", "url("] {
            assert!(!svg.contains(outside), "{outside}");
        }
    }
}
