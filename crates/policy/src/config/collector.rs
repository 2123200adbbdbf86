//! Where what is told of requests is sent, many at a time.

use std::time::Duration;

use prost::encoding::{WireType, encode_key, encode_varint};

/// Who is told, and how. Equal ones share their batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// What is told, for metrics and warnings: `access logs`, `spans`.
    pub what: &'static str,
    /// The cluster that leads to it.
    pub cluster: Box<str>,
    /// `:authority` of what is sent.
    pub authority: Box<str>,
    /// How it is sent.
    pub call: Call,
    /// Headers besides (`initial_metadata`).
    pub headers: Vec<(Box<str>, Box<str>)>,
    /// How long sending a batch may take.
    pub timeout: Duration,
    /// How long what is told waits for more (`buffer_flush_interval`).
    pub interval: Duration,
    /// With so many bytes a batch is sent at once (`buffer_size_bytes`).
    pub size: usize,
    /// What stands around the items of a batch.
    pub envelope: Envelope,
}

/// How a batch is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A call of gRPC, to this path.
    Unary(&'static str),
    /// A message of a call of gRPC that goes on, to this path.
    Stream(&'static str),
    /// A request of HTTP.
    Post {
        /// To this path.
        path: Box<str>,
        /// Its `content-type`.
        content_type: &'static str,
    },
}

/// What stands around the items of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Envelope {
    /// They are values of a repeated field of a message, which may be in other messages.
    Message {
        /// The other fields of that message, encoded.
        before: Vec<u8>,
        /// The messages around, from the inside: their other fields, encoded, and the number of the field that holds the
        /// message within.
        around: Vec<(Vec<u8>, u32)>,
        /// Fields of the outermost that are said once on a stream.
        first: Vec<u8>,
    },
    /// They are values of a JSON array, each followed by a comma.
    Array,
}

impl Envelope {
    /// The content of a call. `first` says that it is the first of its stream.
    pub fn wrap(&self, items: &[u8], first: bool) -> Vec<u8> {
        match self {
            Self::Message { before, around, first: once } => {
                let mut content = [before, items].concat();
                for (before, field) in around {
                    let inner = std::mem::replace(&mut content, before.clone());
                    encode_key(*field, WireType::LengthDelimited, &mut content);
                    encode_varint(inner.len() as u64, &mut content);
                    content.extend_from_slice(&inner);
                }
                if first { [once, content.as_slice()].concat() } else { content }
            }
            Self::Array => [b"[", items.strip_suffix(b",").unwrap_or(items), b"]"].concat(),
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::{Message as _, encoding::message};
    use skysail_xds::otlp::{
        ExportLogsServiceRequest, InstrumentationScope, LogRecord, Resource, ResourceLogs, ScopeLogs,
        attribute,
    };

    use super::*;

    #[test]
    fn items_stand_where_they_belong() {
        let logs = [1, 2].map(|time_unix_nano| LogRecord { time_unix_nano, ..LogRecord::default() });
        let scope = Some(InstrumentationScope { name: "s".into(), ..InstrumentationScope::default() });
        let resource = Some(Resource { attributes: vec![attribute("k", "v")], ..Resource::default() });
        let around = ResourceLogs { resource: resource.clone(), ..ResourceLogs::default() };
        let before = ScopeLogs { scope: scope.clone(), ..ScopeLogs::default() };
        let envelope = Envelope::Message {
            before: before.encode_to_vec(),
            around: vec![(around.encode_to_vec(), 2), (Vec::new(), 1)],
            first: Vec::new(),
        };
        let mut items = Vec::new();
        for log in &logs {
            message::encode(2, log, &mut items);
        }
        let scope_logs = vec![ScopeLogs { scope, log_records: logs.to_vec(), ..ScopeLogs::default() }];
        let resource_logs = vec![ResourceLogs { resource, scope_logs, ..ResourceLogs::default() }];
        let request = ExportLogsServiceRequest::decode(envelope.wrap(&items, true).as_slice()).unwrap();
        assert_eq!(request, ExportLogsServiceRequest { resource_logs });

        assert_eq!(Envelope::Array.wrap(b"1,2,", false), b"[1,2]");
        assert_eq!(Envelope::Array.wrap(b"", false), b"[]");
    }
}
