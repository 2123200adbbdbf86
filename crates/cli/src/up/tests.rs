use super::*;

#[test]
fn programs_are_found_as_shells_find_them() {
    assert_eq!(image("acme/shop=sh -c true").unwrap().1, ["sh", "-c", "true"]);
    assert!(image("a=/bin/sh").is_ok());
    assert!(image("a=../../test.sh").unwrap().1[0].starts_with('/'), "for containers with a workingDir");
    for (text, problem) in [
        ("acme/shop", "IMAGE=COMMAND"),
        ("acme/shop= ", "command is missing"),
        ("a=no-such-program-here", "write ./no-such-program-here"),
        ("a=./no-such-program-here", "not an executable file"),
        ("a=/", "not an executable file"),
        ("a=/etc/passwd", "not an executable file"),
    ] {
        let error = image(text).unwrap_err();
        assert!(error.contains(problem), "{error}");
    }
}

#[test]
fn durations_are_parsed() {
    assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
    assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
    assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
    assert!(duration("30").is_err());
    assert!(duration("-1s").is_err());
}
