//! Access log filters.

use super::attributes;
use skysail_policy::{
    config::log_filter::{Comparison, LogFilter},
    matching,
    record::Context,
    route::sample,
};

/// Returns whether a request or connection is logged.
pub(crate) fn passes(filter: &LogFilter, context: &Context<'_>, rng: &mut fastrand::Rng) -> bool {
    let record = context.record;
    match filter {
        LogFilter::Status(test) => holds(*test, record.status.into()),
        LogFilter::Duration(test) => holds(*test, record.duration.as_millis()),
        LogFilter::Fraction(fraction) => sample(rng, *fraction),
        LogFilter::All(all) => all.iter().all(|one| passes(one, context, rng)),
        LogFilter::OneOf(some) => some.iter().any(|one| passes(one, context, rng)),
        LogFilter::Header(test) => context.request.is_some_and(|head| matching::header(test, head)),
        LogFilter::Flags(None) => record.flags.bits() != 0,
        LogFilter::Flags(Some(some)) => record.flags.bits() & some.bits() != 0,
        LogFilter::GrpcStatus { statuses, exclude } => {
            let status =
                record.grpc_status.unwrap_or_else(|| skysail_http::grpc_status::from_http(record.status));
            statuses.contains(&status) != *exclude
        }
        LogFilter::Expression(expression) => attributes::holds(expression, context),
        LogFilter::Metadata { test, otherwise } => {
            match matching::metadata_value(&test.path, record.metadata) {
                Some(_) => matching::metadata(test, record.metadata),
                None => *otherwise,
            }
        }
    }
}

fn holds(test: Comparison, number: u128) -> bool {
    match test {
        Comparison::Equal(value) => number == value.into(),
        Comparison::NotEqual(value) => number != value.into(),
        Comparison::AtLeast(value) => number >= value.into(),
        Comparison::AtMost(value) => number <= value.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use serde_json::json;

    use super::*;
    use skysail_http::head::RequestHead;
    use skysail_policy::{
        config::{
            listener::Direction,
            text::{HeaderMatch, HeaderTest, MetadataMatch, TextMatch, ValueMatch},
        },
        error::Flags,
        record::Record,
    };

    #[test]
    fn filters_select_what_is_logged() {
        let head = RequestHead::build("GET", "/", "a", &[("x", "1")]);
        let found = json!({"filter": {"key": "a"}});
        let mut record = Record::new(Direction::Inbound, SystemTime::now());
        (record.status, record.duration, record.flags) = (404, Duration::from_millis(7), Flags::NR);
        record.metadata = found.as_object();
        let context = Context { record: &record, request: Some(&head), response: None };
        let header = |name: &str| HeaderMatch {
            name: name.into(),
            test: HeaderTest::Present(true),
            invert: false,
            missing_as_empty: false,
        };
        let metadata = |path: &[&str], otherwise| {
            let test = MetadataMatch {
                path: path.iter().map(|key| (*key).into()).collect(),
                test: ValueMatch::Text(TextMatch::Exact(b"b".as_slice().into())),
                invert: false,
            };
            LogFilter::Metadata { test, otherwise }
        };
        let cases = [
            (LogFilter::Status(Comparison::Equal(404)), true),
            (LogFilter::Status(Comparison::AtLeast(500)), false),
            (LogFilter::Status(Comparison::NotEqual(404)), false),
            (LogFilter::Duration(Comparison::AtMost(7)), true),
            (LogFilter::Fraction(0), false),
            (LogFilter::Header(header("x")), true),
            (LogFilter::Header(header("y")), false),
            (LogFilter::Flags(None), true),
            (LogFilter::Flags(Some(Flags::UF)), false),
            (LogFilter::GrpcStatus { statuses: vec![12], exclude: false }, true),
            (LogFilter::GrpcStatus { statuses: vec![12], exclude: true }, false),
            (metadata(&["filter", "key"], true), false),
            (metadata(&["filter", "other"], true), true),
            (metadata(&["other"], false), false),
            (LogFilter::All(vec![LogFilter::Flags(None), LogFilter::Fraction(0)]), false),
            (LogFilter::OneOf(vec![LogFilter::Flags(None), LogFilter::Fraction(0)]), true),
        ];
        let mut rng = fastrand::Rng::with_seed(1);
        for (filter, expected) in cases {
            assert_eq!(passes(&filter, &context, &mut rng), expected, "{filter:?}");
        }
    }
}
