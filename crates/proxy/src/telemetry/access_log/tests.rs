use std::time::SystemTime;

use super::*;
use skysail_http::head::RequestHead;
use skysail_policy::{
    config::{http::Format, listener::Direction},
    record::Record,
};

fn parse(text: &str) -> Format {
    crate::translate::format(text).unwrap()
}

#[test]
fn lines_of_all_workers_reach_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let path = path.to_str().unwrap();
    let record = Record::new(Direction::Inbound, SystemTime::UNIX_EPOCH);
    let context = Context { record: &record, request: None, response: None };
    let logger = AccessLogger::start().unwrap();
    let (one, two) = (logger.writer().unwrap(), logger.writer().unwrap());
    one.log(path, &LogFormat::Text(parse("one %RESPONSE_CODE%%REQ(x-none)%"), b""), &context);
    two.log(path, &LogFormat::Text(parse("two %RESPONSE_FLAGS%\n"), b"-"), &context);
    assert_eq!(logger.dropped(), 0);
    drop(logger);
    assert_eq!(std::fs::read_to_string(path).unwrap(), "one 0\ntwo -\n");
}

#[test]
fn json_lines_keep_the_order_of_their_fields() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let path = path.to_str().unwrap();
    let record = Record { status: 404, ..Record::new(Direction::Inbound, SystemTime::UNIX_EPOCH) };
    let head = RequestHead::build("GET", "/\"", "h", &[]);
    let context = Context { record: &record, request: Some(&head), response: None };
    let fields: Vec<(Box<str>, Format)> = ["%START_TIME%", "%REQ(:PATH)%", "%RESPONSE_CODE%", "%ROUTE_NAME%"]
        .iter()
        .zip(["start_time", "path", "response_code", "route_name"])
        .map(|(format, name)| (name.into(), parse(format)))
        .collect();
    let logger = AccessLogger::start().unwrap();
    logger.writer().unwrap().log(path, &LogFormat::Json(fields), &context);
    drop(logger);
    let line = "{\"start_time\":\"1970-01-01T00:00:00.000Z\",\"path\":\"/\\\"\",\"response_code\":404,\"route_name\":null}\n";
    assert_eq!(std::fs::read_to_string(path).unwrap(), line);
}

#[test]
fn lines_that_cannot_be_written_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("missing").join("access.log");
    let path = path.to_str().unwrap();
    let (mut sink, dropped) = (Sink::default(), AtomicU64::new(0));
    write_batch(path, &mut sink, b"one\ntwo\n", &dropped);
    assert_eq!(dropped.load(Ordering::Relaxed), 2);
    std::fs::create_dir(dir.path().join("missing")).unwrap();
    write_batch(path, &mut sink, b"three\n", &dropped);
    assert_eq!(std::fs::read_to_string(path).unwrap(), "three\n");
    assert_eq!(dropped.load(Ordering::Relaxed), 2);
}

#[test]
fn lines_that_do_not_fit_are_dropped() {
    let file = File::default();
    let line = vec![b'x'; MAX_BUFFERED / 2];
    assert!(file.append(&line) && file.append(&line) && !file.append(b"y"));
}
