//! Configuration changes in effect, from the control plane's admin page. A line confirms each edit that took effect.

use std::{net::SocketAddr, time::Duration};

use serde::Deserialize;
use skysail_sandbox::http;

const TIMEOUT: Duration = Duration::from_secs(2);

/// Changes that have not been printed yet.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Number of the last change that was printed.
    seen: u64,
}

/// The page `/debug/config_changes`.
#[derive(Debug, Deserialize)]
struct ChangesPage {
    count: u64,
    kept: Vec<Change>,
}

#[derive(Debug, Deserialize)]
struct Change {
    number: u64,
    file: String,
    object: String,
    action: String,
    effect: String,
}

impl Changes {
    /// Requests new changes and returns a line for each; none if the control plane does not answer.
    pub(crate) async fn request(&mut self, control: SocketAddr) -> Vec<String> {
        match http::get(control, "/debug/config_changes", TIMEOUT).await {
            Ok((200, body)) => serde_json::from_str(&body).map(|page| self.lines(page)).unwrap_or_default(),
            _ => Vec::new(),
        }
    }

    fn lines(&mut self, page: ChangesPage) -> Vec<String> {
        // A restarted control plane counts from 1.
        let seen = if page.count < self.seen { 0 } else { self.seen };
        let first = page.kept.first().map_or(0, |change| change.number);
        let missed = first.saturating_sub(seen + 1);
        self.seen = page.count;
        let new = page.kept.into_iter().filter(|change| change.number > seen);
        let mut lines: Vec<_> = new
            .map(|Change { file, object, action, effect, .. }| {
                format!("{action:<10} {object} ({file}): {effect}")
            })
            .collect();
        if missed > 0 {
            lines.insert(0, format!("{missed} earlier changes of the configuration are in effect"));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_change_is_reported_once() {
        let page = |first: u64, count: u64| -> ChangesPage {
            let kept: Vec<_> = (first..=count)
                .map(|number| {
                    json!({ "number": number, "time": 0, "file": "a.yaml", "object": format!("VirtualService shop/{number}"), "action": "applied", "effect": "requests to a" })
                })
                .collect();
            serde_json::from_value(json!({ "count": count, "kept": kept })).unwrap()
        };
        let mut changes = Changes::default();
        assert_eq!(changes.lines(page(1, 0)), Vec::<String>::new());
        assert_eq!(changes.lines(page(1, 1)), ["applied    VirtualService shop/1 (a.yaml): requests to a"]);
        assert_eq!(changes.lines(page(1, 1)), Vec::<String>::new());
        let lines = changes.lines(page(4, 4));
        assert_eq!(lines[0], "2 earlier changes of the configuration are in effect");
        assert_eq!(lines.len(), 2);
        assert_eq!(changes.lines(page(1, 1)).len(), 1);
    }
}
