//! Log lines and memory for rejected configuration.

use skysail_xds::server::Event;

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

#[test]
fn the_rejections_that_a_stream_keeps_are_bounded() {
    let mut status = ClientStatus::new(1, &scopes::client("x", serde_json::json!({})));
    for round in 0..10 {
        for kind in Kind::ALL {
            let reason = format!("{round} {}", "x".repeat(1_000));
            status.record(Event::Rejected { kind, nonce: round, reason: &reason });
        }
    }
    let sizes =
        status.types().map(|(_, of)| of.rejections.iter().map(|kept| kept.error.len()).sum::<usize>());
    let sizes: Vec<usize> = sizes.collect();
    assert!((7 << 10..=8 << 10).contains(&sizes.iter().sum::<usize>()), "{sizes:?}");
    let (_, last) = status.types().last().unwrap();
    assert!(last.rejections.last().unwrap().error.starts_with("9 "), "the newest is kept");
}
