//! Log lines about rejected configuration.

use super::*;

#[test]
fn log_lines_about_rejections_are_limited_by_identity_over_all_streams() {
    let (bucket, start) = (TokenBuckets::new(REJECTION_LINES), Instant::now());
    let lines = |identity: &str, streams: usize, now: Instant| -> Vec<u64> {
        let client =
            || NewClient { identity: identity.to_owned(), ..scopes::client("x", serde_json::json!({})) };
        let mut lines = Vec::new();
        for _ in 0..streams {
            let mut status = ClientStatus::new(1, &client());
            let kinds = [Kind::Cluster, Kind::Listener].into_iter();
            lines.extend(kinds.filter_map(|kind| status.admit_rejection_line(kind, &bucket, now)));
        }
        lines
    };
    assert_eq!(lines("a", 1_000, start), [0; 20]);
    assert_eq!(lines("b", 1, start), [0; 2], "another identity has its own limit");
    assert_eq!(
        lines("a", 1_000, start + Duration::from_secs(10)),
        [1_980],
        "the next line has the number of suppressed lines"
    );
    let mut status = ClientStatus::new(1, &scopes::client("x", serde_json::json!({})));
    let mut at =
        |seconds| status.admit_rejection_line(Kind::Cluster, &bucket, start + Duration::from_secs(seconds));
    assert_eq!([at(0), at(9), at(10)], [Some(0), None, Some(0)], "a stream logs one line per interval");
}
