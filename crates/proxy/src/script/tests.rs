//! Limits and the sandbox. `tests/lua.rs` tests the API over sockets.
#![allow(clippy::unwrap_used, reason = "a test ends with the first thing that goes wrong")]

use super::{MAX_MEMORY, check};

#[test]
fn functions_of_a_script_are_found() {
    let script = check("function envoy_on_response(handle) end").unwrap();
    assert!(!script.handles_request && script.handles_response);
}

#[test]
fn invalid_scripts_are_refused() {
    assert!(check("function (").is_err());
    let problem = check("error('wrong')").unwrap_err();
    assert!(problem.contains("wrong"), "{problem}");
}

#[test]
fn steps_are_limited() {
    let endless = [
        "while true do end",
        "while true do pcall(function() while true do end end) end",
        "while true do coroutine.resume(coroutine.create(function() while true do end end)) end",
        "string.find(string.rep('a', 100000), string.rep('.-', 20) .. 'b')",
    ];
    for script in endless {
        let problem = check(script).unwrap_err();
        assert!(problem.contains("limit of steps"), "{script}: {problem}");
    }
}

#[test]
fn memory_is_limited() {
    let hungry = [
        "local all = {} for index = 1, 1e9 do all[index] = string.rep('x', 1000) .. index end",
        "local text = 'x' while true do text = text .. text end",
        "string.rep('x', 1e9)",
        "table.create(1e9, 0)",
    ];
    for script in hungry {
        let problem = check(script).unwrap_err();
        assert!(
            problem.contains("memory") || problem.contains("too large") || problem.contains("overflow"),
            "{script}: {problem}"
        );
    }
    const { assert!(MAX_MEMORY <= 16 << 20) };
}

#[test]
fn functions_that_are_not_interrupted_are_bounded() {
    assert!(check("table.move({}, 1, 2147483646, 2, {})").is_err());
    assert!(check("return unpack({}, 1, 1e8)").is_err());
    check("local moved = table.move({1, 2, 3}, 1, 3, 2, {}) assert(moved[4] == 3)").unwrap();
}

#[test]
fn nothing_outside_of_the_state_is_reachable() {
    let globals =
        ["io", "debug", "package", "require", "load", "loadstring", "dofile", "loadfile", "newproxy"];
    for name in globals {
        check(&format!("assert({name} == nil, '{name} exists')")).unwrap();
    }
    check("assert(os.execute == nil and os.getenv == nil and os.remove == nil and os.exit == nil)").unwrap();
}

#[test]
fn deep_recursion_fails_without_a_crash() {
    let recursive = [
        "local function deep() return 1 + deep() end deep()",
        "local text = string.rep('a', 300000) string.find(text, string.rep('a?', 300000))",
        "local t = setmetatable({}, {}) getmetatable(t).__index = t local v = t.x",
    ];
    for script in recursive {
        let result = check(script);
        assert!(result.is_err(), "{script}");
    }
}

/// Calls by way of the interpreter's functions use the stack of the worker: up to 2 MiB in a debug build, 256 KiB in a
/// release build. A worker has 2 MiB.
#[test]
fn nested_calls_of_the_interpreter_are_bounded() {
    let nested = [
        "local function deep() pcall(deep) end deep()",
        "local function deep() xpcall(deep, deep) end deep()",
        "local function deep() ('a'):gsub('a', deep) end deep()",
        "local function deep() table.sort({1, 2, 3}, deep) end deep()",
        "local function deep() coroutine.wrap(deep)() end deep()",
        "local function deep() coroutine.resume(coroutine.create(deep)) end deep()",
        "local object = setmetatable({}, {}) getmetatable(object).__index = function(t, k) return t[k] end return object.a",
        "local object = setmetatable({}, {}) getmetatable(object).__tostring = tostring return tostring(object)",
        "local object = setmetatable({}, {}) getmetatable(object).__eq = function(a, b) return a == b end
            return object == setmetatable({}, getmetatable(object))",
    ];
    let run = move || nested.map(|script| _ = check(script));
    std::thread::Builder::new().stack_size(2 << 20).spawn(run).unwrap().join().unwrap();
}

/// What Lua 5.1 and LuaJIT have.
#[test]
fn scripts_for_lua_5_1_run() {
    check(
        r##"
        assert(tostring(6 / 2) == "3" and 7 / 2 == 3.5 and 10 / 5 .. "" == "2")
        assert(select("#", unpack({1, 2})) == 2 and table.getn({1, 2, 3}) == 3 and math.pow(2, 3) == 8)
        assert("\%d" == "%d" and string.format("%d", 3) == "3" and ("x"):rep(3) == "xxx")
        assert(bit.band(0xffffffff, -1) == -1 and bit.tohex(255) == "000000ff" and bit.lshift(1, 31) == -2147483648)
        assert(setfenv and getfenv and string.gmatch and table.insert and next and rawget and os.time() > 0)
        local count = 0
        for key, value in pairs({a = 1, b = 2}) do count = count + value end
        assert(count == 3)
        "##,
    )
    .unwrap();
}
