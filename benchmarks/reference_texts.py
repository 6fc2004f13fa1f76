"""Texts of about 200 tokens each in five languages, for comparison with a reference implementation."""

TEXTS = {
    "English": (
        "A library at night is a strange place. The lamps above the long tables have gone out one after another, and only "
        "the clock over the entrance keeps its small green light. Somebody has left a newspaper on the window sill, folded "
        "to the crossword, with three answers missing. In the basement the pumps of the heating system start with a sigh, "
        "and a minute later the pipes along the shelves begin to tick as they grow warm. An old caretaker walks his round. "
        "He knows which door sticks in wet weather, which step creaks, and in which corner students fall asleep over their "
        "law books in the week before the examinations. Tonight there is no one. He takes the newspaper, sits down on the "
        "lowest step of the stairs, reads the first clue and laughs quietly, because the answer is the name of the street "
        "in which he was born. Then he looks for a pencil."
    ),
    "German": (
        "Der Zug nach Dresden hatte an diesem Morgen zwanzig Minuten Verspätung, und auf dem Bahnsteig sammelten sich die "
        "Reisenden in kleinen Gruppen. Eine Frau mit einem großen Koffer fragte, ob der Anschluss in Leipzig warten werde. "
        "Niemand wusste es. Der Schaffner, der schließlich erschien, zuckte nur mit den Schultern und sagte, man müsse "
        "eben Geduld haben. Über den Gleisen hing dünner Nebel, und aus der Bäckerei in der Halle roch es nach frischen "
        "Brötchen. Als der Zug endlich einfuhr, drängten alle gleichzeitig zu den Türen, obwohl die Wagen fast leer waren."
    ),
    "Korean": (
        "비가 그친 뒤의 골목은 조용했다. 할머니는 가게 문을 열고 젖은 의자를 닦았다. 학교에 가는 아이들이 인사를 하며 "
        "지나갔고, 빵집에서는 갓 구운 빵 냄새가 났다. 오늘은 손님이 많을 것 같다고 할머니는 생각했다."
    ),
    "Chinese": (
        "清晨的市场已经很热闹了。卖菜的大娘把新鲜的白菜和萝卜摆得整整齐齐，旁边的老人正在挑选豆腐。"
        "孩子们背着书包跑过石桥，河面上飘着一层薄薄的雾。茶馆的老板烧好了第一壶水，等着熟悉的客人来聊天。"
        "虽然天气有点冷，可是每个人的脸上都带着微笑。"
    ),
    "Arabic": (
        "في صباح هادئ خرج الصياد إلى البحر قبل شروق الشمس. كان الهواء باردا والأمواج صغيرة، وكانت المدينة ما زالت نائمة. "
        "ألقى شبكته في الماء وانتظر طويلا وهو يفكر في أولاده."
    ),
}
