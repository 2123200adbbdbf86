use std::time::SystemTime;

use serde_json::json;

use super::*;
use crate::config::{
    limit::{LimitAction as Action, RouteRules},
    listener::Direction,
    route::QueryMatch,
    text::{HeaderMatch, HeaderTest, TextMatch},
};
use crate::state::rate_limit::{BucketSettings, BucketsSettings, DescriptorSettings};

fn rule(actions: Vec<Action>) -> LimitRule {
    LimitRule { stage: 0, actions, hits: None, limit: None, report: None }
}

fn made(rule: &LimitRule) -> Option<String> {
    let head = RequestHead::build("GET", "/a?q=1&r=&q=2", "h", &[("x", "y"), ("n", "7")]);
    let mut record = Record::new(Direction::Inbound, SystemTime::now());
    let metadata = json!({"f": {"a": {"b": "text"}, "n": 1, "l": {"requests_per_unit": 9, "unit": "HOUR"}}});
    record.metadata = metadata.as_object();
    let request = LimitRequest {
        head: &head,
        client: "192.168.77.99".parse().unwrap(),
        source_cluster: "here",
        destination_cluster: Some("there"),
        record: &record,
    };
    let made = descriptors([rule], &request).pop()?;
    let mut text: Vec<_> = made.entries.iter().map(|Entry { key, value }| format!("{key}={value}")).collect();
    text.extend(made.hits.map(|hits| format!("hits={hits}")));
    text.extend(made.limit.map(|(requests, unit)| format!("limit={requests}/{unit}")));
    Some(text.join(" "))
}

#[test]
fn each_action_adds_its_entry_or_drops_the_descriptor() {
    let value = |from, skip_if_absent| Action::Value { key: "k".into(), from, skip_if_absent };
    let header = |name: &str, skip| value(ValueSource::Header(name.into()), skip);
    let query = |name: &str| value(ValueSource::Query(name.into()), false);
    let metadata = |path: &[&str], default: &str| {
        value(ValueSource::Metadata(path.iter().map(|&key| key.into()).collect(), default.into()), false)
    };
    let test = |wanted: &str, expected| Action::Match {
        key: "m".into(),
        value: "v".into(),
        expected,
        headers: vec![HeaderMatch {
            name: "x".into(),
            test: HeaderTest::Value(TextMatch::Exact(wanted.as_bytes().into())),
            invert: false,
            missing_as_empty: false,
        }],
        query: vec![QueryMatch { name: "q".into(), value: None }],
    };
    for (action, expected) in [
        (Action::SourceCluster, Some("source_cluster=here")),
        (Action::DestinationCluster, Some("destination_cluster=there")),
        (Action::RemoteAddress, Some("remote_address=192.168.77.99")),
        (Action::MaskedRemoteAddress { v4: 24, v6: 128 }, Some("masked_remote_address=192.168.77.0/24")),
        (Action::MaskedRemoteAddress { v4: 0, v6: 0 }, Some("masked_remote_address=0.0.0.0/0")),
        (Action::Constant { key: "c".into(), value: "d".into() }, Some("c=d")),
        (header("x", false), Some("k=y")),
        (header(":path", false), Some("k=/a?q=1&r=&q=2")),
        (header("z", false), None),
        (header("z", true), Some("")),
        (query("q"), Some("k=1")),
        (query("r"), Some("k=")),
        (query("z"), None),
        (metadata(&["f", "a", "b"], ""), Some("k=text")),
        (metadata(&["f", "n"], ""), None),
        (metadata(&["f", "n"], "d"), Some("k=d")),
        (test("y", true), Some("m=v")),
        (test("y", false), None),
        (test("z", true), None),
        (test("z", false), Some("m=v")),
    ] {
        let shown = format!("{action:?}");
        assert_eq!(made(&rule(vec![action])).as_deref(), expected, "{shown}");
    }
}

#[test]
fn hits_and_limits_come_from_the_rule() {
    let constant = || vec![Action::Constant { key: "c".into(), value: "d".into() }];
    let mut with = rule(constant());
    with.hits = Some(Hits::Number(3));
    with.limit = Some(vec!["f".into(), "l".into()]);
    assert_eq!(made(&with).as_deref(), Some("c=d hits=3 limit=9/HOUR"));
    with.limit = Some(vec!["f".into(), "n".into()]);
    assert_eq!(made(&with).as_deref(), Some("c=d hits=3"));
}

#[test]
fn rules_of_the_virtual_host_apply_as_configured() {
    let rules = |count: usize| (0..count).map(|_| rule(Vec::new())).collect::<Vec<_>>();
    let host = rules(10);
    for (own, include_host, option, expected) in [
        (0, false, HostRules::Override, 10),
        (1, false, HostRules::Override, 1),
        (1, true, HostRules::Override, 11),
        (1, true, HostRules::Ignore, 11),
        (1, false, HostRules::Include, 11),
        (0, false, HostRules::Ignore, 0),
    ] {
        let route = RouteRules { rules: rules(own), include_host };
        assert_eq!(super::rules(Some(&route), &host, option, 0).count(), expected);
        assert_eq!(super::rules(Some(&route), &host, option, 1).count(), 0);
    }
}

#[test]
fn the_slowest_bucket_decides_and_the_default_one_comes_last() {
    let bucket = |max, seconds| BucketSettings {
        max_tokens: max,
        fill: 1,
        interval: std::time::Duration::from_secs(seconds),
    };
    let entries = |value: &str| vec![Entry { key: "k".into(), value: value.into() }];
    let settings =
        |value: &str, bucket| DescriptorSettings { entries: entries(value).into(), bucket, shadow: false };
    let buckets = || {
        Buckets::new(&BucketsSettings {
            default: Some(bucket(3, 100)),
            descriptors: vec![settings("fast", bucket(9, 100)), settings("slow", bucket(1, 1000))],
            max_dynamic_descriptors: 1,
        })
    };
    let descriptor =
        |value: &str| Descriptor { entries: entries(value), hits: None, limit: None, report: None };
    let both = [descriptor("fast"), descriptor("slow")];
    let now = Instant::now();
    let one = buckets();
    let max = |taken: &TokenDecision| taken.bucket.as_ref().map(|bucket| bucket.tokens.max_tokens());
    let first = take(&one, &both, true, now);
    assert_eq!((first.allowed, max(&first)), (true, Some(1)));
    let second = take(&one, &both, true, now);
    assert_eq!((second.allowed, max(&second)), (false, Some(1)));
    // The refused request took nothing from the other buckets.
    assert_eq!(one.find(&entries("fast")).unwrap().tokens.remaining(now), 8);
    assert_eq!(one.default.as_ref().unwrap().tokens.remaining(now), 2);
    let two = buckets();
    assert!((0..9).all(|_| take(&two, &both[..1], false, now).allowed));
    assert!(!take(&two, &both[..1], false, now).allowed);
    let three = buckets();
    assert_eq!((0..9).filter(|_| take(&three, &both[..1], true, now).allowed).count(), 3);
    assert_eq!((0..9).filter(|_| take(&three, &[descriptor("other")], false, now).allowed).count(), 0);
}
