//! Rate limit of similar messages. Messages that differ only in names and numbers form a group: the first
//! ones are printed, the others are counted. The module does no IO: it takes times and texts, and returns
//! decisions.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// Number of messages of a group that are printed.
const FIRST: usize = 3;
/// Idle time after which a group ends. It ends after [`MAX_TIME`] at the latest, so that a steady stream of messages is
/// reported repeatedly.
const IDLE: Duration = Duration::from_secs(1);
const MAX_TIME: Duration = Duration::from_secs(5);
/// Maximum number of concurrent groups. Messages that would begin further groups are printed.
const MAX_GROUPS: usize = 1_000;

/// Open groups, by the shape of their messages.
#[derive(Debug, Default)]
pub(crate) struct Bursts {
    groups: HashMap<String, Group>,
}

#[derive(Debug)]
struct Group {
    since: Instant,
    latest: Instant,
    count: usize,
    last: String,
}

impl Bursts {
    /// Returns whether to print a message now. Otherwise the message is counted, and [`Self::over`] reports it.
    pub(crate) fn admit(&mut self, text: &str, now: Instant) -> bool {
        self.groups.retain(|_, group| group.count > FIRST || group.end() > now);
        let shape = shape(text);
        if self.groups.len() >= MAX_GROUPS && !self.groups.contains_key(&shape) {
            return true;
        }
        let new = Group { since: now, latest: now, count: 0, last: String::new() };
        let group = self.groups.entry(shape).or_insert(new);
        group.latest = now;
        group.count += 1;
        if group.count > FIRST {
            text.clone_into(&mut group.last);
        }
        group.count <= FIRST
    }

    /// Returns the time at which the next group with unprinted messages ends.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.groups.values().filter(|group| group.count > FIRST).map(Group::end).min()
    }

    /// Ends the groups that are due at `by`; without it, ends all groups. Returns a line for each group that
    /// has unprinted messages.
    pub(crate) fn over(&mut self, by: Option<Instant>) -> Vec<String> {
        let ended = self.groups.extract_if(|_, group| by.is_none_or(|by| group.end() <= by));
        let mut ended: Vec<Group> =
            ended.map(|(_, group)| group).filter(|group| group.count > FIRST).collect();
        ended.sort_by_key(|group| group.latest);
        let line = |group: Group| format!("{} more like this, the last: {}", group.count - FIRST, group.last);
        ended.into_iter().map(line).collect()
    }
}

impl Group {
    fn end(&self) -> Instant {
        (self.latest + IDLE).min(self.since + MAX_TIME)
    }
}

/// Returns the shape of a message: without quoted texts, and without words that contain digits, slashes, hyphens or
/// dots. Several of these in a row count as one, because lists differ in length.
fn shape(text: &str) -> String {
    let mut shape = String::new();
    for (number, part) in text.split(['"', '`']).enumerate() {
        let is_quoted = number % 2 == 1;
        for word in part.split_whitespace() {
            let core = word.trim_matches(|c: char| !c.is_alphanumeric());
            let is_name =
                word.contains(|c: char| c.is_ascii_digit() || c == '/') || core.contains(['-', '.']);
            if !is_quoted && !is_name {
                shape.push_str(word);
                shape.push(' ');
            } else if !shape.ends_with("* ") {
                shape.push_str("* ");
            }
        }
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_share_a_shape_if_they_differ_in_names_and_numbers_only() {
        for (one, other) in [
            ("shop/web-7f9c-x1: main ended (exit code 1)", "shop/stock-7f9c-y2: main ended (exit code 137)"),
            (
                "error: /a/b.yaml:3: VirtualService n/a: spec.http[0]: no such field",
                "error: c.yaml: VirtualService m/b: spec.tcp: no such field",
            ),
            ("env \"A B\" is not set", "env \"C\" is not set"),
            ("gone shop/a-1, shop/a-2, shop/a-3: x", "gone shop/a-1: x"),
        ] {
            assert_eq!(shape(one), shape(other));
        }
        for (one, other) in [
            ("error: a.yaml: x", "warning: a.yaml: x"),
            ("shop/a: main ended", "shop/a: proxy ended"),
            ("a \"b\" c", "a \"b\" d"),
        ] {
            assert_ne!(shape(one), shape(other));
        }
    }

    #[test]
    fn the_first_messages_of_a_burst_are_printed_and_the_others_counted() {
        let mut bursts = Bursts::default();
        let start = Instant::now();
        let admitted = (0..20).filter(|n| bursts.admit(&format!("shop/web-{n}: starting"), start)).count();
        assert_eq!(admitted, 3);
        assert!(bursts.admit("another message", start));
        assert_eq!(bursts.deadline(), Some(start + IDLE));
        assert_eq!(bursts.over(Some(start + IDLE / 2)), [""; 0]);
        let counted = ["17 more like this, the last: shop/web-19: starting"];
        assert_eq!(bursts.over(Some(start + IDLE)), counted);
        assert_eq!(bursts.deadline(), None);
        assert!(bursts.admit("shop/web-1: starting", start + IDLE), "the next burst begins");
    }

    #[test]
    fn a_steady_stream_is_counted_repeatedly() {
        let mut bursts = Bursts::default();
        let start = Instant::now();
        let (mut printed, mut counted, mut lines) = (0, 0, 0);
        for tenth in 0..100 {
            let now = start + Duration::from_millis(100) * tenth;
            for line in bursts.over(Some(now)) {
                lines += 1;
                counted += line.split(' ').next().unwrap().parse::<u32>().unwrap();
            }
            printed += u32::from(bursts.admit("shop/web: failed", now));
        }
        for line in bursts.over(None) {
            lines += 1;
            counted += line.split(' ').next().unwrap().parse::<u32>().unwrap();
        }
        assert_eq!((printed, counted, lines), (6, 94, 2));
    }

    #[test]
    fn messages_with_pauses_are_all_printed() {
        let mut bursts = Bursts::default();
        let start = Instant::now();
        assert!((0..10).all(|n| bursts.admit("shop/web: failed", start + IDLE * n)));
    }

    #[test]
    fn the_number_of_groups_is_bounded() {
        let mut bursts = Bursts::default();
        let now = Instant::now();
        let letters =
            |n: usize| -> String { n.to_string().chars().map(|c| (c as u8 - b'0' + b'a') as char).collect() };
        assert!((0..2 * MAX_GROUPS).all(|n| bursts.admit(&letters(n), now)));
        assert_eq!(bursts.groups.len(), MAX_GROUPS);
    }
}
