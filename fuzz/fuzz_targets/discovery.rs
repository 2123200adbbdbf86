//! Fuzzes `skysail_fuzz::discovery`.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| skysail_fuzz::discovery(data));
