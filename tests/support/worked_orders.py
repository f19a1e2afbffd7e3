"""Orders as their sources print them, for p = 4 and m = 8: the first and some other ranks.

A pass is a letter and a microbatch; ' is the second chunk of a rank (the way back, where stages lie on a V), > and <
are the directions of a bidirectional pipeline, . parts the slice, [x+y] is one overlapped action."""

WORKED = {
    "interleaved": {
        0: "F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' F4' B2' F5' B3' F6' B0 F7' B1 B2 B3 B4' B5' B6' B7' "
        "B4 B5 B6 B7",
        1: "F0 F1 F2 F3 F0' F1' F2' F3' F4 B0' F5 B1' F6 B2' F7 B3' F4' B0 F5' B1 F6' B2 F7' B3 B4' B5' B6' B7' "
        "B4 B5 B6 B7",
        2: "F0 F1 F2 F3 F0' F1' F2' B0' F3' B1' F4 B2' F5 B3' F6 B0 F7 B1 F4' B2 F5' B3 F6' B4' F7' B5' B6' B7' "
        "B4 B5 B6 B7",
        3: "F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1 F6 B2 F7 B3 F4' B4' F5' B5' F6' B6' F7' B7' "
        "B4 B5 B6 B7",
    },
    "zb-h1": {
        0: "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7",
        1: "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7",
        2: "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7",
        3: "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7",
    },
    "zb-h2": {
        0: "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7",
        1: "F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7",
        2: "F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7",
        3: "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7",
    },
    "zb-v": {
        0: "F0 F1 F2 F3 F4 F5 F6 F0' I0' W0' F1' I1' W1' F2' I2' W2' F3' I3' W3' F7 I0 W0 F4' I4' W4' I1 W1 F5' I5' "
        "W5' I2 W2 F6' I6' W6' I3 W3 F7' I7' W7' I4 W4 I5 W5 I6 W6 I7 W7",
        3: "F0 F0' F1 F1' F2 F2' F3 F3' I0' W0' F4 I0 W0 F4' I1' W1' F5 I1 W1 F5' I2' W2' F6 I2 W2 F6' I3' W3' F7 I3 "
        "W3 F7' I4' W4' I4 I5' I5 I6' I6 I7' I7 W4 W5' W6' W7' W5 W6 W7",
    },
    "dualpipe": {
        0: "F0> F1> F2> F0< I0< W0< F1< [F3>+B1<] [F2<+B0>] B2< [F3<+B1>] B3< I2> W2> I3> W3>",
        1: "F0> F0< F1> F1< F2> B0< [F2<+B0>] [F3>+B1<] [F3<+B1>] B2< B2> I3< I3> W3< W3>",
    },
    "dualpipe-v": {
        3: "F0 F0' F1 F1' F2 F2' F3 F3' F4 B0' [F4'+B0] [F5+B1'] [F5'+B1] [F6+B2'] [F6'+B2] [F7+B3'] [F7'+B3] B4' B4 "
        "B5' B5 I6' I6 I7' I7 W6' W6 W7' W7",
    },
}

CHIMERA = {
    0: "F0> F1> F0< B0< F1< B1< B0> B1>",
    1: "F0> F0< F1> F1< B0< B0> B1< B1>",
    2: "F0< F0> F1< F1> B0> B0< B1> B1<",
    3: "F0< F1< F0> B0> F1> B1> B0< B1<",
}
"""D = 4, N = 4."""

SEQ1F1B = {
    0: "F0.0 F0.1 F1.0 F1.1 F2.0 B0.1 F2.1 B0.0 F3.0 B1.1 F3.1 B1.0 B2.1 B2.0 B3.1 B3.0",
    3: "F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 F2.0 B1.0 F2.1 B2.1 F3.0 B2.0 F3.1 B3.1 B3.0",
}
"""p = 4, m = 4, k = 2."""
