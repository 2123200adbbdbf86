//! Log lines about refused configuration.

use super::*;

#[test]
fn short_streams_of_one_identity_do_not_fill_the_log_with_refusals() {
    let (bucket, start) = (Buckets::new(REFUSALS), Instant::now());
    let lines = |identity: &str, streams: usize, now: Instant| -> Vec<u64> {
        let client =
            || NewClient { identity: identity.to_owned(), ..scopes::client("x", serde_json::json!({})) };
        let mut lines = Vec::new();
        for _ in 0..streams {
            let mut status = ClientStatus::new(1, &client());
            let kinds = [Kind::Cluster, Kind::Listener].into_iter();
            lines.extend(kinds.filter_map(|kind| status.refusal_to_log(kind, &bucket, now)));
        }
        lines
    };
    assert_eq!(lines("a", 1_000, start), [0; 20]);
    assert_eq!(lines("b", 1, start), [0; 2], "another identity has lines of its own");
    assert_eq!(
        lines("a", 1_000, start + Duration::from_secs(10)),
        [1_980],
        "the next line counts those left out"
    );
    let mut status = ClientStatus::new(1, &scopes::client("x", serde_json::json!({})));
    let mut at =
        |seconds| status.refusal_to_log(Kind::Cluster, &bucket, start + Duration::from_secs(seconds));
    assert_eq!([at(0), at(9), at(10)], [Some(0), None, Some(0)], "one stream refuses again and again");
}
