use prost::Message as _;
use serde_json::json;
use skysail_xds::envoy::pb::envoy::service::accesslog::v3::stream_access_logs_message::{
    HttpAccessLogEntries, TcpAccessLogEntries,
};

use super::*;
use skysail_policy::config::listener::Direction;

#[test]
fn metadata_and_every_response_flag_are_set() {
    let found = json!({"filter": {"text": "a", "list": [1, true, null]}});
    let mut record = Record::new(Direction::Inbound, SystemTime::UNIX_EPOCH);
    record.metadata = found.as_object();
    record.flags = Flags::UAEX;
    record.flags.insert(Flags::OM);
    let context = Context { record: &record, request: None, response: None };
    let mut items = Vec::new();
    entry(None, &context, &mut items);
    let entry = TcpAccessLogEntries::decode(items.as_slice()).unwrap().log_entry.remove(0);
    let common = entry.common_properties.unwrap();
    let flags = common.response_flags.unwrap();
    assert!(flags.overload_manager && flags.unauthorized_details.is_some() && !flags.no_route_found);
    let metadata = &common.metadata.unwrap().filter_metadata["filter"];
    let list = vec![Kind::NumberValue(1.0), Kind::BoolValue(true), Kind::NullValue(0)];
    let values = list.into_iter().map(|kind| ValueProto { kind: Some(kind) }).collect();
    assert_eq!(metadata.fields["list"].kind, Some(Kind::ListValue(ListValue { values })));
    assert_eq!(metadata.fields["text"].kind, Some(Kind::StringValue("a".to_owned())));
}

#[test]
fn a_connection_can_be_logged_as_a_request() {
    let record = Record::new(Direction::Inbound, SystemTime::UNIX_EPOCH);
    let context = Context { record: &record, request: None, response: None };
    let mut items = Vec::new();
    entry(Some(&LogHeaders::default()), &context, &mut items);
    let entry = HttpAccessLogEntries::decode(items.as_slice()).unwrap().log_entry.remove(0);
    assert_eq!(entry.protocol_version(), HttpVersion::ProtocolUnspecified);
    assert_eq!(entry.response.unwrap().response_code, None);
}
