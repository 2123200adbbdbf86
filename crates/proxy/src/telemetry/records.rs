//! Access logs as OpenTelemetry log records.

use std::time::SystemTime;

use prost::encoding::message;
use skysail_proto::otlp::{AnyValue, ArrayValue, KeyValue, KeyValueList, LogRecord, any_value};

use skysail_policy::{config::http::LogValue, format, record::Context};

/// Field number of records in `ScopeLogs`.
const LOG_RECORDS: u32 = 2;

/// Appends a record.
pub(crate) fn record(
    body: Option<&LogValue>,
    attributes: &[(Box<str>, LogValue)],
    context: &Context<'_>,
    items: &mut Vec<u8>,
) {
    let since = context.record.start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let span = context.record.span;
    let record = LogRecord {
        time_unix_nano: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
        body: body.map(|body| value(body, context)),
        attributes: named(attributes, context),
        trace_id: span.map(|span| span.trace.to_be_bytes().to_vec()).unwrap_or_default(),
        span_id: span.map(|span| span.span.to_be_bytes().to_vec()).unwrap_or_default(),
        ..LogRecord::default()
    };
    message::encode(LOG_RECORDS, &record, items);
}

fn named(values: &[(Box<str>, LogValue)], context: &Context<'_>) -> Vec<KeyValue> {
    let pair = |(key, of): &(Box<str>, LogValue)| KeyValue {
        key: key.to_string(),
        value: Some(value(of, context)),
        ..KeyValue::default()
    };
    values.iter().map(pair).collect()
}

fn value(of: &LogValue, context: &Context<'_>) -> AnyValue {
    let value = match of {
        LogValue::Text(text) => {
            let mut out = Vec::new();
            format::write(text, context, b"-", &mut out);
            any_value::Value::StringValue(String::from_utf8_lossy(&out).into_owned())
        }
        LogValue::List(list) => any_value::Value::ArrayValue(ArrayValue {
            values: list.iter().map(|of| value(of, context)).collect(),
        }),
        LogValue::Map(map) => any_value::Value::KvlistValue(KeyValueList { values: named(map, context) }),
    };
    AnyValue { value: Some(value) }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use skysail_proto::otlp::ScopeLogs;

    use super::*;
    use skysail_policy::{config::listener::Direction, record::Record, trace::SpanContext};

    #[test]
    fn a_record_contains_the_span_id_of_its_request() {
        let span = SpanContext {
            trace: 1,
            long: true,
            span: 2,
            parent: None,
            remote: false,
            sampled: true,
            state: Box::default(),
        };
        let ids = |span| {
            let record = Record { span, ..Record::new(Direction::Inbound, SystemTime::UNIX_EPOCH) };
            let mut items = Vec::new();
            super::record(None, &[], &Context { record: &record, request: None, response: None }, &mut items);
            let log = ScopeLogs::decode(items.as_slice()).unwrap().log_records.remove(0);
            (log.trace_id, log.span_id)
        };
        assert_eq!(ids(Some(&span)), (1_u128.to_be_bytes().into(), 2_u64.to_be_bytes().into()));
        assert_eq!(ids(None), (vec![], vec![]));
    }
}
